"""Commands run in this process, so that one import of torch serves all tests."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pilotfish.cli import main
from pilotfish.server import main as server
from pilotfish.server.application import ServerSetup


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Every line of stdout, each a JSON object."""
        return [json.loads(line) for line in self.stdout.splitlines()]


Run = Callable[..., Result]
Configured = Callable[..., ServerSetup]


@pytest.fixture
def pilotfish(capfd: pytest.CaptureFixture[str]) -> Run:
    """`pilotfish("generate", "--json", …)`, from its arguments to its exit code and both streams."""

    def run(*arguments: object) -> Result:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        return Result(code, *capfd.readouterr())

    return run


@pytest.fixture
def generate(pilotfish: Run, llama: Path) -> Run:
    """`generate --json` on the tiny model, in float32, on one thread, without compilation."""
    fixed = (
        "--target",
        llama,
        "--dtype",
        "float32",
        "--threads",
        1,
        "--eager",
        "--json",
        "--max-tokens",
        8,
        "--budget",
        "fixed",
    )
    return lambda *arguments: pilotfish("generate", *fixed, *arguments)


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows (objects, or text that is no JSON) into a prompts file."""

    def write(*rows: object) -> Path:
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def configured(pilotfish: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[Configured]:
    """What `pilotfish serve` with these arguments would run."""
    root, setups = logging.getLogger(), list[ServerSetup]()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setattr(server, "run_server", lambda setup, _: setups.append(setup))

    def configure(*arguments: object) -> ServerSetup:
        result = pilotfish("serve", *arguments)
        assert (result.code, result.stderr) == (0, "")
        return setups.pop()

    yield configure
    root.handlers[:], root.level = handlers, level
