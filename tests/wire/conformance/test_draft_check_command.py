"""`pilotfish draft-check`, from its arguments to its exit code; and on this project's own draft."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from drafters import ForeignTokens, Lawful, listening
from sizes import sized

from pilotfish.cli import main
from pilotfish.wire.conformance.kit import SENTENCES

Told = tuple[int, str, str]
Check = Callable[..., Told]
SYNTHETIC = ("--tokenizer-digest", "digest", "--patience", "2")


@pytest.fixture
def check(capfd: pytest.CaptureFixture[str]) -> Check:
    def run(*arguments: object) -> Told:
        capfd.readouterr()
        code = main(["draft-check", *map(str, arguments)])
        return code, *capfd.readouterr()

    return run


@pytest.fixture(scope="module")
def own_draft(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A pool of the bundled draft, in a process of its own."""
    directory = tmp_path_factory.mktemp("pool", numbered=False)
    directory.chmod(0o700)
    command = ["draft", "--pair", "pycode", "--json", "--listen", f"ipc://{directory}/draft.sock", "--threads", "1"]
    with subprocess.Popen(
        [sys.executable, "-m", "pilotfish", *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["endpoint"]
        finally:
            process.terminate()


def test_the_bundled_draft_passes(check: Check, own_draft: str) -> None:
    few = ("follows-commits", "resyncs-gaps", "pauses", "prefix-keys", "survives-loss", "names-unknown-messages")
    only = sized([part for name in few for part in ("--only", name)], [])
    code, stdout, stderr = check("--pool", own_draft, "--json", "--garbage", 2000, "--sessions", 16, *only)
    report = json.loads(stdout)
    failed = [finding for finding in report["findings"] if finding["status"] == "fail"]
    assert (code, failed) == (0, []), stderr
    assert report["model"] == "pycode/draft" and {"pauses", "errors", "prefix_keys"} <= set(report["capabilities"])
    assert report["trees"] > 50 and not [one for one in report["findings"] if one["status"] == "skipped"]


def test_a_table_and_an_exit_code(check: Check) -> None:
    with listening(ForeignTokens) as endpoint:
        code, stdout, stderr = check("--pool", endpoint, *SYNTHETIC, "--only", "guesses")
    assert code == 1 and "tree-vocabulary" in stdout and "token 4101; vocab_size is 4096" in stdout
    assert "guesses" in stderr  # the bar
    with listening(Lawful) as endpoint:
        code, stdout, _ = check("--pool", endpoint, *SYNTHETIC, "--only", "guesses")
    assert code == 0 and stdout.splitlines()[-1].endswith("1 checks passed, 0 failed.")


def test_the_list_has_every_name(check: Check) -> None:
    code, stdout, _ = check("--list")
    assert code == 0 and all(f"{name} " in stdout for name in SENTENCES)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "pool: None is not allowed"),
        (("--pool", "draft.sock"), "pool: 'draft.sock'"),
        (("--pool", "ipc:///nowhere/draft.sock", *SYNTHETIC, "--patience", "0.5"), "nothing answered"),
        (("--pool", "ipc:///x", "--only", "nonsense"), "--list"),
        (("--pool", "ipc:///x", "--pair", "pycode", "--tokenizer-digest", "x"), "give one of"),
        (("--pool", "ipc:///x", "--tokenizer", "/nowhere"), "/nowhere"),
        (("--pool", "tcp://192.0.2.1:7070", *SYNTHETIC), "key"),
        (("--pool", "ipc:///x", *SYNTHETIC, "--pool-key", "x"), "draft_key"),
    ],
)
def test_what_cannot_be(check: Check, arguments: tuple[str, ...], words: str) -> None:
    code, stdout, stderr = check(*arguments)
    lines = [line for line in stderr.splitlines() if line.startswith("pilotfish")]
    assert code == 2 and stdout == "" and len(lines) == 1 and words in lines[0], stderr
