"""The offline engine in a process of its own, as contestant of a server: `python -m pilotfish.bench.offline CONFIG`
says on stdout when it is ready, then answers each Round on its stdin by one Outcome."""

from __future__ import annotations

import sys
import time
from typing import Any

import msgspec
from msgspec import Struct

from pilotfish.config import EngineConfig, config_of, config_text
from pilotfish.engine.engine import Engine
from pilotfish.engine.process import WorkerSpec, die_with_parent

READY = b"ready\n"


class Task(Struct, frozen=True):
    """One sequence; the rest of its parameters is the model's generation_config.json's."""

    prompt: str
    params: dict[str, Any]  # by SamplingParams' names, which those of a completion's body are too


class Round(Struct, frozen=True):
    """What is run: so many tasks at a time."""

    tasks: list[Task]
    concurrency: int


class Outcome(Struct, frozen=True):
    """Of a round."""

    seconds: float
    tokens: int
    texts: list[str]  # of each task


def offline_spec(config: EngineConfig) -> WorkerSpec:
    """How to start it."""
    return WorkerSpec("offline", [sys.executable, "-m", "pilotfish.bench.offline", config_text(config)])


def run_round(engine: Engine, work: Round) -> Outcome:
    """All tasks to their end, from the call with their texts to the last token."""
    engine.worker.scheduler.max_requests = work.concurrency
    began = time.perf_counter()
    samples = [engine.submit(task.prompt, engine.sampling_params(**task.params))[0] for task in work.tasks]
    while engine.busy:
        engine.step()
    seconds = time.perf_counter() - began
    return Outcome(seconds, sum(len(sample.token_ids) for sample in samples), [sample.text for sample in samples])


def main() -> None:
    die_with_parent()
    with Engine(config_of(sys.argv[1], EngineConfig)) as engine:
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()
        for line in sys.stdin.buffer:
            outcome = run_round(engine, msgspec.json.decode(line, type=Round))
            sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
