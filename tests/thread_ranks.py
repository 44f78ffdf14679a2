"""Ranks as threads of the test's process: their shards, forwards and sums are real, no interpreter starts."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support import NoProcesses
from torch import Tensor

from pilotfish.config.engine import EngineConfig
from pilotfish.engine.processes import rank, ranks
from pilotfish.engine.processes.ranks import Ranks
from pilotfish.model.loading.loader import LoadedModel
from pilotfish.model.loading.shards import Shard

#: Seconds that one may take to end, or to come to a meeting.
SETTLE = 60.0


class Meeting:
    """Where the threads of a group exchange tensors."""

    def __init__(self, count: int) -> None:
        self.parts: list[Tensor] = [torch.empty(0)] * count
        self.barrier = threading.Barrier(count, timeout=SETTLE)


class ThreadGroup:
    """Implements `Group` without a library."""

    def __init__(self, shard: Shard, meeting: Meeting) -> None:
        self.shard = shard
        self._meeting = meeting

    def all_gather(self, x: Tensor) -> Sequence[Tensor]:
        self._meeting.parts[self.shard.rank] = x
        self._meeting.barrier.wait()
        parts = [part.clone() for part in self._meeting.parts]
        self._meeting.barrier.wait()
        return parts

    def gather(self, x: Tensor) -> Sequence[Tensor]:
        parts = self.all_gather(x)
        return parts if self.shard.rank == 0 else []


def thread_groups(count: int) -> list[ThreadGroup]:
    meeting = Meeting(count)
    return [ThreadGroup(Shard(index, count), meeting) for index in range(count)]


def on_threads(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """All calls at a time; their results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


@contextmanager
def thread_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines that are made meanwhile have their other ranks here. These load after the first one, one by one:
    transformers loads for one thread at a time."""
    with ExitStack() as stack, monkeypatch.context() as patch:
        waiting, begin = list[threading.Thread](), Ranks.begin
        alone, load = threading.Lock(), rank.load_configured

        def load_alone(*arguments: Any) -> LoadedModel:
            with alone:
                return load(*arguments)

        def command(config: EngineConfig, index: int, path: Path) -> list[str]:
            waiting.append(threading.Thread(target=rank._serve, args=(config.of_rank(index), index, path)))
            return []

        def begin_all(engines: Ranks, slots: int) -> None:
            for thread in waiting:
                thread.start()
                stack.callback(thread.join, SETTLE)
            waiting.clear()
            begin(engines, slots)

        patch.setattr(rank, "load_configured", load_alone)
        patch.setattr(ranks, "Supervisor", NoProcesses)
        patch.setattr(ranks, "rank_command", command)
        patch.setattr(Ranks, "begin", begin_all)
        yield
