"""Exit codes, help and errors, whatever the command."""

import logging
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from command_runs import Refused
from explained_traffic import counted

from pilotfish import cli
from pilotfish.cli import generate
from pilotfish.errors import EngineError


@pytest.mark.parametrize(
    "arguments", [[], *([*c.split(), "--help"] for c in ("", "generate", "chat", "demo", "train"))]
)
def test_help(pilotfish, arguments: list[str]) -> None:
    result = pilotfish(*arguments)
    assert result.code == 0 and "Usage" in result.stdout and result.stderr == ""


@pytest.mark.parametrize("arguments", [["nonsense"], ["--nonsense"], ["train"], ["train", "pair"]])
def test_bad_usage_is_one_line(refused: Refused, arguments: list[str]) -> None:
    refused(*arguments)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (EngineError("it\nbroke"), "EngineError: it broke"),
        (OSError("\x1b[2Jowned\x07\r\nsecond \x9b\u202e\ud800"), r"OSError: \x1b[2Jowned\x07 second \x9b\u202e\ud800"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_failures_are_one_line_and_exit_code_1(
    pilotfish, monkeypatch: pytest.MonkeyPatch, error: BaseException, line: str
) -> None:
    """What an error quotes gives a terminal no commands."""

    def fail(*_: object, **__: object) -> int:
        raise error

    monkeypatch.setattr(cli, "commands", lambda *_: fail)
    result = pilotfish("generate")
    assert (result.code, result.stdout, result.stderr) == (1, "", f"pilotfish: {line}\n")


def test_a_log_that_nobody_configured_gives_no_commands(pilotfish) -> None:
    """Python prints its warnings by a handler of last resort."""
    pilotfish("--help")
    record = logging.LogRecord("a", logging.WARNING, "file", 1, "a pool said %s", ("\x1b[2J\nforged",), None)
    assert logging.lastResort is not None
    assert logging.lastResort.format(record) == r"a pool said \x1b[2J\nforged"


def test_ctrl_c_within_a_command_is_a_failure(pilotfish, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "engine_config", interrupted)
    result = pilotfish("generate", "--prompt", "a")
    assert (result.code, result.stdout, result.stderr) == (1, "", "pilotfish: interrupted\n")


@pytest.mark.parametrize("command", ["generate", "serve"])
def test_what_matters_first_stands_first(pilotfish, command: str) -> None:
    """Then groups of others; a default that words describe is shown too."""
    shown = pilotfish(command, "--help").stdout
    first, *groups = shown.split("╭─ Options")[1].split("╭─ ")
    options = [line.split()[1] for line in first.splitlines() if line.startswith("│ --")]
    assert options[:2] == ["--pair", "--target,--model"]
    assert len(options) <= 10 + len(["--prompt", "--prompts", "--json", "--help"])
    assert {group.split(" ─")[0] for group in groups} >= {"Speculation", "Device and memory"}
    assert "[default: (all)]" in shown


def test_commands_that_need_no_torch_import_none(tmp_path: Path) -> None:
    """Nor does the command line itself."""
    (tmp_path / "told.json").write_bytes(msgspec.json.encode(counted([]).told(1e9)))
    simulated = ["--target", "10ms", "--mode", "off", "--concurrency", "1", "--requests", "1", "--output-tokens", "4"]
    commands = [
        ["generate", "--help"],
        ["serve", "--help"],
        ["plan", "simulate", *simulated],
        ["explain", "--from", str(tmp_path / "told.json"), "--before", "2h..1h", "--after", "1h..now"],
    ]
    code = f"import sys; from pilotfish.cli import main; print([(main(c), 'torch' in sys.modules) for c in {commands}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == str([(0, False)] * len(commands))
