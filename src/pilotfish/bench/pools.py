"""Draft pools, and networks before them, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import cached_property
from types import TracebackType
from typing import Any

from pilotfish.bench.proxy import HOST
from pilotfish.config import EngineConfig
from pilotfish.engine.draft_workers import Placement, split_cores, worker_command
from pilotfish.engine.engine import Engine
from pilotfish.engine.process import WorkerSpec, on_cores, worker_environment
from pilotfish.engine.remote_drafts import RemoteDrafts, target_identity
from pilotfish.errors import EngineError


class Listener:
    """A program that says in JSON, on the first line of its stdout, where it listens. It ends with the `with`, and with
    the thread that has started it."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._name = spec.name
        with on_cores(spec.cores):
            self._process = subprocess.Popen(
                list(spec.command),
                env=worker_environment(spec),
                stdin=subprocess.PIPE,  # its end tells that of this process, where nothing else does
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )

    @cached_property
    def told(self) -> dict[str, Any]:
        """What it has said. Waits for that; EngineError where it ends instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"{self._name}: exited with code {self._process.wait()} before it listened")
        found: dict[str, Any] = json.loads(line)
        return found

    def signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid, number)

    def close(self) -> None:
        """Kill it, stopped or not. Idempotent."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def place(pools: int) -> Placement:
    """Cores of this process for the target and for so many pools."""
    return split_cores(frozenset(os.sched_getaffinity(0)), "", "", pools)


def on_target_cores(config: EngineConfig, placement: Placement) -> EngineConfig:
    """An engine of `config` that leaves the pools' cores alone."""
    return replace(config, cores=",".join(map(str, sorted(placement.target))), threads=0)


def start_pool(config: EngineConfig, cores: frozenset[int], options: Sequence[str] = ()) -> Listener:
    """A pool of the draft of `config` on a free port of this host, loading; `told["endpoint"]` once it serves."""
    command = [*worker_command(config, f"tcp://{HOST}:0", "draft pool"), "--json", *options]
    return Listener(WorkerSpec("draft pool", command, cores))


def start_proxy(endpoint: str, round_trips: Sequence[float], mbit: float, cores: frozenset[int]) -> Listener:
    """Networks before a pool, one for each round trip of so many milliseconds."""
    numbers = map(str, (mbit, *round_trips))
    command = [sys.executable, "-m", "pilotfish.bench.proxy", endpoint.removeprefix("tcp://"), *numbers]
    return Listener(WorkerSpec("proxy", command, cores))


def proxied(proxy: Listener) -> list[str]:
    """Where the pool is found behind each of the proxy's networks."""
    return [f"tcp://{HOST}:{port}" for port in proxy.told["ports"]]


@contextmanager
def attached(engine: Engine, endpoints: Sequence[str]) -> Iterator[RemoteDrafts]:
    """An idle engine's connection to pools; its drafter is for `engine.use`."""
    config = replace(engine.config, mode="async", draft_pool=tuple(endpoints))
    identity = target_identity(config, engine.tokenizer, engine.model.shape.vocab_size)
    with closing(RemoteDrafts(config, identity)) as remote:
        yield remote
