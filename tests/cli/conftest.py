"""Commands run in this process, so that one import of torch serves all tests."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_runs import PLAIN, Configured, Refused, Result, Run, write_rows
from inline_drafts import inline_drafts

from pilotfish.cli import generate as generate_command
from pilotfish.cli import main, workers
from pilotfish.config.engine import EngineConfig
from pilotfish.config.text import config_text
from pilotfish.engine.drafts import draft_pool
from pilotfish.engine.engine import Engine
from pilotfish.engine.prefills import prefill_pool
from pilotfish.server import main as server
from pilotfish.server.application import ServerSetup


@pytest.fixture
def pilotfish(capfd: pytest.CaptureFixture[str]) -> Run:
    """`pilotfish("generate", "--json", …)`, from its arguments to its exit code and both streams."""

    def run(*arguments: object) -> Result:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        return Result(code, *capfd.readouterr())

    return run


@pytest.fixture
def refused(pilotfish: Run) -> Refused:
    """`refused("serve", …)`: the one line with which these arguments are refused, and nothing on stdout. A worker's
    own log may come before."""

    def refuse(*arguments: object) -> str:
        result = pilotfish(*arguments)
        *logged, line = result.stderr.splitlines()
        assert (result.code, result.stdout) == (2, "") and line.startswith("pilotfish: "), result
        assert all(one.startswith(f"pilotfish {arguments[0]}: ") for one in logged), result
        return line.removeprefix("pilotfish: ")

    return refuse


@pytest.fixture
def line(refused: Refused, llama: Path) -> Refused:
    """The one line with which `generate` on the tiny model refuses these options."""
    return lambda *options: refused("generate", "--target", llama, *PLAIN, "--prompt", "a b c d", *options)


@pytest.fixture
def where(tmp_path: Path) -> str:
    """Where a pool may listen."""
    return f"ipc://{tmp_path}/pool"


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Draft workers are in this process."""
    with inline_drafts(monkeypatch):
        yield


@pytest.fixture(scope="module")
def engines() -> dict[str, Engine]:
    """Those that are alone and leave nothing, by their configuration."""
    return {}


@pytest.fixture
def generate(pilotfish: Run, llama: Path, engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`generate --json` on the tiny model, which is loaded once for all tests of a file."""
    load = generate_command.started

    def started(config: EngineConfig) -> AbstractContextManager[Engine]:
        if config.mode != "off" or config.kv_disk is not None or config.prefills_elsewhere:
            return load(config)
        name = config_text(config)
        engines[name] = engines.get(name) or load(config)
        return nullcontext(engines[name])

    monkeypatch.setattr(generate_command, "started", started)
    fixed = ("--target", llama, *PLAIN, "--json", "--max-tokens", 8, "--budget", "fixed")
    return lambda *arguments: pilotfish("generate", *fixed, *arguments)


@pytest.fixture
def prompts(tmp_path: Path) -> Callable[..., Path]:
    """Writes rows (objects, or text that is no JSON) into a prompts file."""
    return partial(write_rows, tmp_path / "prompts.jsonl")


@pytest.fixture
def configured(pilotfish: Run, monkeypatch: pytest.MonkeyPatch) -> Configured:
    """What `pilotfish serve` with these arguments would run."""
    setups = list[ServerSetup]()
    monkeypatch.setattr(server, "run_server", lambda setup, _: setups.append(setup))

    def configure(*arguments: object) -> ServerSetup:
        result = pilotfish("serve", *arguments)
        assert (result.code, result.stderr) == (0, "")
        return setups.pop()

    return configure


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations of workers and servers that were to be run."""
    seen = list[Any]()
    monkeypatch.setattr(workers, "_import_transformers", lambda: None)
    monkeypatch.setattr(workers, "run_worker", lambda _, work: work(None))
    monkeypatch.setattr(workers, "_run_target", lambda config, *_: seen.append(config))
    monkeypatch.setattr(server, "run_server", lambda setup, _: seen.append(setup.server))
    monkeypatch.setattr(draft_pool, "run_pool", lambda config, _: seen.append(config))
    monkeypatch.setattr(prefill_pool, "run_prefill_pool", lambda config, _: seen.append(config))
    return seen
