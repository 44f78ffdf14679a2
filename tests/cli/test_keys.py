"""`pilotfish keys`: a file with both halves, the public one on stdout."""

import re
from pathlib import Path

import pytest
from command_runs import Refused, Run

from pilotfish.server.auth import Caller, load_keyring
from pilotfish.wire.curve_keys import load_allowlist, load_key_pair, public_key


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_new_key_and_how_to_use_it(pilotfish: Run, tmp_path: Path) -> None:
    made = pilotfish("keys", "new", "target")
    identity = load_key_pair("key", Path("target.key"))
    assert (made.code, made.stderr) == (0, "") and identity.secret not in made.stdout
    assert (tmp_path / "target.key").stat().st_mode & 0o777 == 0o600
    shown = pilotfish("keys", "show", "target.key")
    assert (shown.code, shown.stdout, shown.stderr) == (0, identity.public + "\n", "")
    assert public_key("draft_pool_key", shown.stdout.strip()) == identity.public
    (line,) = (line for line in made.stdout.splitlines() if "TENANT" in line)
    Path("allow").write_text(line)
    assert load_allowlist(Path("allow"))[identity.public].tenant == "TENANT"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["new", ""], "name: '' is not allowed"),
        (["new", "no/such/place"], "No such file or directory"),
        (["show", "nowhere.key"], "file: 'nowhere.key' is not allowed; expected a file that can be read"),
        (["api", "two words"], "name: 'two words' is not allowed"),
    ],
)
def test_bad_usage_is_one_line(refused: Refused, arguments: list[str], message: str) -> None:
    assert message in refused("keys", *arguments)


def test_a_clients_key_and_its_entry(pilotfish: Run) -> None:
    made = pilotfish("keys", "api", "search")
    assert (made.code, made.stderr) == (0, "")
    (secret,) = re.findall(r"^    (pf-\S+)$", made.stdout, re.MULTILINE)
    file = Path("keys.toml")
    file.write_text(made.stdout[made.stdout.index("    [[key]]") :])
    file.chmod(0o600)
    assert load_keyring(file=file).caller(f"Bearer {secret}") == Caller("search")
