"""API keys: who is let in, which files are refused, and that no secret is ever shown."""

import hashlib
import hmac
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from pilotfish.errors import ParameterError
from pilotfish.server import auth
from pilotfish.server.auth import Caller, Keyring, file_entry, load_file, load_keyring, new_secret, refuse_open

ONE, TWO, THREE = (f"pf-{letter * 30}" for letter in "abc")
SHA = hashlib.sha256(TWO.encode()).hexdigest()
FILE = f"""
[[key]]
name = "search"
secret = "{ONE}"
cache_salt = "salty-salt"
requests_per_minute = 600
tokens_per_minute = 200_000
max_concurrency = 32

[[key]]
name = "team@chat/1"
sha256 = "{SHA.upper()}"
"""
SEARCH = Caller("search", "salty-salt", 600, 200_000, 32)
Write = Callable[[str | bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Into a file that only its owner reads."""

    def written(text: str | bytes) -> Path:
        path = tmp_path / "keys.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(0o600)
        return path

    return written


def refusal(load: Callable[[], object]) -> str:
    """The line with which keys are refused; it shows no secret."""
    line = refused(ParameterError, load)
    assert not any(secret in line for secret in (ONE, TWO, THREE, SHA))
    return line


def test_without_keys_everybody_is_anonymous() -> None:
    assert not load_keyring()
    for header in (None, "", f"Bearer {ONE}", "nonsense"):
        assert load_keyring().caller(header) == auth.ANONYMOUS


def test_keys_of_a_file(write: Write) -> None:
    ring = load_keyring(file=write(FILE))
    assert len(ring) == 2
    assert ring.caller(f"Bearer {ONE}") == SEARCH
    assert ring.caller(f"Bearer {TWO}") == Caller("team@chat/1")


def test_keys_from_everywhere_come_together(write: Write) -> None:
    ring = load_keyring(["option" * 3], f"{THREE}, environment-secret", write(FILE))
    given = ["option" * 3, THREE, "environment-secret", ONE, TWO]
    found = [ring.caller(f"Bearer {secret}") for secret in given]
    assert [caller and caller.name for caller in found] == ["key-1", "key-2", "key-3", "search", "team@chat/1"]


@pytest.mark.parametrize("header", [f"bearer {ONE}", f"BEARER   {ONE}", f" Bearer {ONE} "])
def test_headers_that_are_understood(header: str) -> None:
    assert load_keyring([ONE]).caller(header) == Caller("key-1")


@pytest.mark.parametrize(
    "header",
    [
        *(None, "", "Bearer", "Bearer ", "Bearer \n", "Bearer \udcff", "Bearer é"),
        *(ONE, f"Basic {ONE}", f"Bearer{ONE}", f"Bearer {ONE}x", f"Bearer {ONE[:-1]}", f"Bearer {ONE} {ONE}"),
        *(f"Bearer {ONE.upper()}", f"Bearer {TWO}"),
    ],
)
def test_headers_that_let_nobody_in(header: str | None) -> None:
    assert load_keyring([ONE, THREE]).caller(header) is None


@given(st.text())
def test_nobody_comes_in_with_anything_else(text: str) -> None:
    ring = load_keyring([ONE])
    assert ring.caller(text) is None and ring.caller(f"Bearer {text}") is None


@pytest.mark.parametrize("secret", [ONE, TWO, THREE, "unknown"])
def test_all_digests_are_compared_whichever_matches(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = load_keyring([ONE, TWO, THREE])
    compared: list[tuple[bytes, bytes]] = []

    def compare_digest(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return hmac.compare_digest(a, b)

    monkeypatch.setattr(auth, "hmac", type("hmac", (), {"compare_digest": staticmethod(compare_digest)}))
    found = ring.caller(f"Bearer {secret}")
    digests = [hashlib.sha256(text.encode()).digest() for text in (ONE, TWO, THREE)]
    assert compared == [(digest, hashlib.sha256(secret.encode()).digest()) for digest in digests]
    assert (found is None) == (secret == "unknown")


def test_no_repr_shows_a_secret(write: Write) -> None:
    ring, loaded = load_keyring([THREE]), load_file(write(FILE))
    shown = repr((ring, vars(ring), loaded, ring.caller(f"Bearer {THREE}")))
    digests = [hashlib.sha256(secret.encode()).digest() for secret in (ONE, TWO, THREE)]
    assert not any(secret in shown for secret in (ONE, TWO, THREE, SHA, "salty-salt"))
    assert not any(repr(digest)[2:-1] in shown for digest in digests)


@pytest.mark.parametrize(
    "secret", ["", "short", "x" * 15, "x" * 513, "spaces in a secret", "ein Geheimnis: Käse", "x" * 16 + "\n"]
)
def test_secrets_that_are_refused(secret: str, write: Write) -> None:
    line = refusal(lambda: load_keyring([secret]))
    assert line.startswith(
        f"api_key: ({len(secret)} characters, not shown) is not allowed; expected 16 to 512 printable"
    )
    assert secret == "" or secret not in line
    assert "(0 characters, not shown)" in refusal(lambda: load_keyring([], f"{ONE},"))
    if "," not in secret and secret.strip() == secret and secret:
        assert refusal(lambda: load_keyring([], f"{ONE},{secret}")).startswith("PILOTFISH_API_KEY: (")
        assert "key 1, secret: (" in refusal(lambda: load_file(write(f'[[key]]\nname = "a"\nsecret = "{secret}"')))


def key(**options: object) -> str:
    """A table with a name and a secret, and with `options` instead, as TOML."""
    texts = {"name": '"a"', "secret": f'"{ONE}"'} | {name: str(option) for name, option in options.items()}
    return "[[key]]\n" + "".join(f"{name} = {text}\n" for name, text in texts.items() if text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected tables [[key]], and nothing beside them"),
        (key() + "[other]", "expected tables [[key]], and nothing beside them"),
        (f'key = ["{ONE}"]', "key 1: 'str' is not allowed; expected a table"),
        (
            key(requests_per_hour=3),
            "key 1, field: 'requests_per_hour' is not allowed; expected one of name, secret, sha256",
        ),
        (key(name=""), "key 1, name: None is not allowed; expected 1 to 64"),
        (key(name="7"), "key 1, name: 7 is not allowed"),
        (key(name='"a\\nb"'), r"key 1, name: 'a\nb' is not allowed"),
        (key(name='"' + "x" * 65 + '"'), "key 1, name: 'xxx"),
        (key(secret=""), "key 1: [] is not allowed; expected either `secret` or `sha256`"),
        (key(sha256=f'"{SHA}"'), "key 1: ['secret', 'sha256'] is not allowed"),
        (key(secret="1234567890123456"), "key 1, secret: (16 characters, not shown) is not allowed"),
        (key(secret="", sha256=f'"{SHA}0"'), "key 1, sha256: (65 characters, not shown) is not allowed; expected 64"),
        (key(cache_salt='""'), "key 1, cache_salt: (0 characters, not shown)"),
        (key(cache_salt="7"), "key 1, cache_salt: (1 characters, not shown)"),
        (key(requests_per_minute="0"), "key 1, requests_per_minute: 0 is not allowed; expected an integer 1 to"),
        (key(tokens_per_minute="true"), "key 1, tokens_per_minute: True is not allowed"),
        (key(max_concurrency='"many"'), "key 1, max_concurrency: 'many' is not allowed"),
        (key() + key(name='"b"', max_concurrency="0"), "key 2, max_concurrency: 0 is not allowed"),
        (
            key() + key(secret=f'"{TWO}"'),
            "api_keys: 'a' is not allowed; expected a name for each key that no other has",
        ),
        (key() + key(name='"b"'), "api_keys: 'b' is not allowed; expected a secret of its own, not that of 'a'"),
        (f'[[key]]\nname = "a"\nsecret = {ONE}', "expected TOML, not so at line 3, column 10"),
        (b"\xff\xfe", "expected TOML"),
        (f"key = {'9' * 5000}", "expected TOML"),
        ("#" * ((1 << 20) + 1), "expected a file of at most"),
    ],
)
def test_files_that_are_refused(text: str | bytes, message: str, write: Write) -> None:
    line = refusal(lambda: load_keyring(file=write(text)))
    assert line.startswith("api_keys: ") and message in line


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o644, 0o777])
def test_a_file_that_others_can_read_or_write_is_refused(mode: int, write: Write) -> None:
    path = write(FILE)
    path.chmod(mode)
    assert "mode 0600" in refusal(lambda: load_file(path))


def test_the_group_may_read_what_root_put_there(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a Secret that Kubernetes mounts."""
    path = write(FILE)
    monkeypatch.setattr(auth, "os", SimpleNamespace(geteuid=lambda: 10001))

    def put_by(uid: int, mode: int) -> None:
        facts = SimpleNamespace(st_uid=uid, st_mode=0o100000 | mode)
        monkeypatch.setattr("pilotfish.files.os", SimpleNamespace(fstat=lambda _: facts))

    put_by(0, 0o440)
    assert load_file(path)
    for uid, mode in ((0, 0o460), (0, 0o444), (10001, 0o440)):
        put_by(uid, mode)
        assert "mode 0600" in refusal(lambda: load_file(path))


def test_no_file_and_no_file_at_all(tmp_path: Path) -> None:
    assert "No such file" in refusal(lambda: load_file(tmp_path / "nowhere"))
    assert "Is a directory" in refusal(lambda: load_file(tmp_path))


def test_the_same_secret_in_an_option_and_in_a_file(write: Write) -> None:
    message = "'team@chat/1' is not allowed; expected a secret of its own, not that of 'key-1'"
    assert message in refusal(lambda: load_keyring([TWO], "", write(FILE)))


def test_a_new_secret_and_its_entry(write: Write) -> None:
    secret = new_secret()
    assert secret != new_secret() and len(secret) >= 43
    entry = file_entry("search", secret)
    assert secret not in entry
    assert load_keyring(file=write(entry)).caller(f"Bearer {secret}") == Caller("search")


@pytest.mark.parametrize("name", ["", 'a"b', "a b", "x" * 65])
def test_names_that_no_key_can_have(name: str) -> None:
    assert refusal(lambda: file_entry(name, ONE)).startswith("name: ")


SOME = load_keyring([ONE])


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "localhost"])
@pytest.mark.parametrize("ring", [SOME, Keyring([])])
def test_loopback_may_be_open(host: str, ring: Keyring) -> None:
    refuse_open(host, ring, False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "2001:db8::1", "::ffff:192.0.2.1"])
def test_other_hosts_need_keys_or_intent(host: str) -> None:
    line = refusal(lambda: refuse_open(host, Keyring([]), False))
    assert line == (
        f"host: {host!r} is not allowed; expected a loopback address; "
        "others need --api-key, --api-keys or --allow-anonymous"
    )
    refuse_open(host, SOME, False)
    refuse_open(host, Keyring([]), True)


def test_keys_and_anonymous_clients_exclude_each_other() -> None:
    assert refusal(lambda: refuse_open("127.0.0.1", SOME, True)).startswith("allow_anonymous: True is not allowed")


@pytest.mark.parametrize("host", ["", "*", "no-such-host.invalid", "x" * 64])
def test_hosts_that_are_none(host: str) -> None:
    assert "a host that can be resolved" in refusal(lambda: refuse_open(host, Keyring([]), False))
