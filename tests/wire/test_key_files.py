"""Files of keys: what is written can be read, and what is wrong is told with its line."""

import re
from pathlib import Path

import pytest
import zmq
from refusals import refused

from pilotfish.errors import InputError, ParameterError
from pilotfish.wire import curve_keys


def fixed_key_pair(character: str) -> curve_keys.KeyPair:
    """The same in every process, for the names of tests."""
    secret = 40 * character
    return curve_keys.KeyPair(zmq.curve_public(secret.encode()).decode(), secret)


ONE, TWO = fixed_key_pair("f"), fixed_key_pair("h")


def key_file(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


@pytest.fixture
def own(tmp_path: Path) -> Path:
    curve_keys.write_key_pair(ONE, tmp_path / "own.key")
    return tmp_path / "own.key"


def test_a_key_is_read_as_written_and_only_by_its_owner(own: Path) -> None:
    assert curve_keys.load_key_pair("key", own) == ONE
    assert own.stat().st_mode & 0o777 == 0o600
    assert ONE.secret not in repr(ONE) and ONE.secret not in repr(curve_keys.TargetKeys(ONE, TWO.public))


def test_no_key_is_written_over(own: Path) -> None:
    with pytest.raises(ParameterError, match=r"name: .*own\.key' is not allowed; expected a file that does not exist"):
        curve_keys.write_key_pair(TWO, own)
    assert curve_keys.load_key_pair("key", own) == ONE


def test_new_keys_can_stand_in_files_and_after_options() -> None:
    for _ in range(100):
        key = curve_keys.new_key_pair()
        assert key.public[0].isalnum() and key.secret[0].isalnum()
        assert zmq.curve_public(key.secret.encode()).decode() == key.public


BOTH = f"public {ONE.public}\nsecret {ONE.secret}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected the two halves of one key"),
        (f"public {ONE.public}\n", "expected the two halves of one key"),
        (f"public {ONE.public}\nsecret {TWO.secret}\n", "expected the two halves of one key"),
        (BOTH + f"public {ONE.public}\n", "line 3: expected `public` or `secret`, each once"),
        ("# comment\n\nprivate x\n", "line 3: expected `public` or `secret`"),
        (f"public {ONE.public} {ONE.public}\n", "line 1"),
        (f"public {ONE.public[:-1]}\n", "line 1"),
        (f"public {ONE.public[:-1]}~\n", "line 1"),
        (f"public {'#' * 5}{ONE.public[5:]}\n", "line 1"),
        (f"public %%%%%{ONE.public[5:]}{'é'}\n", "line 1"),
        (f"secret {'%' * 4}#{ONE.secret[5:]}\n", "line 1"),
    ],
)
def test_what_is_no_key(text: str, message: str, tmp_path: Path) -> None:
    line = refused(InputError, curve_keys.load_key_pair, "draft_key", key_file(tmp_path / "k", text))
    assert line.startswith(f"draft_key: {tmp_path}/k") and message in line
    assert ONE.secret not in line and TWO.secret not in line


def test_a_key_that_everyone_can_read_is_refused(own: Path) -> None:
    own.chmod(0o644)
    with pytest.raises(InputError, match="can be read or written by everyone"):
        curve_keys.load_key_pair("key", own)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "long").write_bytes(b"#" * ((1 << 20) + 1))
    for path, message in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(InputError, match=f"^key: .*can be read .{message}"):
            curve_keys.load_key_pair("key", path)
    for name, message in (("bytes", "text in UTF-8"), ("long", "at most")):
        with pytest.raises(InputError, match=message):
            curve_keys.load_allowlist(tmp_path / name)


def test_an_allowlist(tmp_path: Path) -> None:
    hashed = "a#b" + ONE.public[3:]
    text = f"# clients\n\n{ONE.public} search 3  # the index\n  {TWO.public}\tchat\n#{ONE.public} gone\n{hashed} x .5\n"
    clients = curve_keys.load_allowlist(key_file(tmp_path / "allow", text))
    assert clients == {
        ONE.public: curve_keys.PoolClient("search", 3.0),
        TWO.public: curve_keys.PoolClient("chat", 1.0),
        hashed: curve_keys.PoolClient("x", 0.5),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lists nobody"),
        ("# only a comment\n", "lists nobody"),
        (f"{ONE.public}\n", "line 1: 1 words"),
        (f"{ONE.public} a 1 2\n", "line 1: 4 words"),
        (f"\n{ONE.public[:-1]} a\n", "line 2: .* is no public key"),
        ("%%%%%" * 8 + "  a\n", "line 1: .* is no public key"),
        (f"{ONE.public} a\n{ONE.public} b\n", "line 2: .* is listed twice"),
        (f"{ONE.public} a,b\n", "line 1: tenant 'a,b'"),
        (f"{ONE.public} {'a' * 65}\n", "line 1: tenant"),
        *((f"{ONE.public} a {weight}\n", f"line 1: weight '{weight}'") for weight in ("0", "-1", "nan", "inf", "much")),
    ],
)
def test_what_is_no_allowlist(text: str, message: str, tmp_path: Path) -> None:
    assert re.match(
        f"allow: .*{message}", refused(InputError, curve_keys.load_allowlist, key_file(tmp_path / "allow", text))
    )


def test_a_pool_s_keys(own: Path, tmp_path: Path) -> None:
    allow = key_file(tmp_path / "allow", f"{TWO.public} chat\n")
    assert curve_keys.load_pool_keys(None, None) is None
    keys = curve_keys.load_pool_keys(own, allow)
    assert keys is not None and keys.own == ONE and keys.allowed == {TWO.public: curve_keys.PoolClient("chat", 1.0)}
    with pytest.raises(ParameterError, match="allow: None is not allowed; expected an allowlist"):
        curve_keys.load_pool_keys(own, None)
    with pytest.raises(ParameterError, match="key: None is not allowed; expected a key file"):
        curve_keys.load_pool_keys(None, allow)


def test_a_target_s_keys(own: Path) -> None:
    assert curve_keys.load_target_keys(None, [], 2) == [None, None]
    assert curve_keys.load_target_keys(own, [TWO.public] * 2, 2) == [curve_keys.TargetKeys(ONE, TWO.public)] * 2
    for key, pool_keys, message in (
        (None, [TWO.public], "draft_key: None"),
        (own, [], "draft_pool_key: .* one public key for each of 1 pools"),
        (own, [TWO.public] * 2, "draft_pool_key: .* one public key for each of 1 pools"),
        (own, ["short"], "draft_pool_key: 'short' is not allowed; expected a public key of 40 characters"),
    ):
        with pytest.raises(ParameterError, match=message):
            curve_keys.load_target_keys(key, pool_keys, 1)
