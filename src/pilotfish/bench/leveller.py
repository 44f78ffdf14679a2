"""A process that grows levels of a draft on one back-end and says how long each took: a forward of leaves, and the
children of each."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import Backend, DType
from pilotfish.config.workers import DraftConfig
from pilotfish.core.cache.slots import Slots
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import NO_NODES, NO_SAMPLING, Executor, NodeRows, Sampling, SequenceRows
from pilotfish.engine.drafts.draft_pool import load_draft
from pilotfish.engine.processes.process import die_with_parent, name_process

CONTEXT = 256  # tokens of each session
MOST_SESSIONS = 4
LEVELS = 8  # of a tree
MOST_LEAVES = 32
SLOTS = MOST_SESSIONS * CONTEXT + LEVELS * MOST_LEAVES
PARAMS = SamplingParams(temperature=0.8)


class Leveller:
    """Sessions with a context each, and trees below them, which are grown anew each time."""

    def __init__(self, executor: Executor, children: int = DraftConfig.children) -> None:
        self._executor, self._children = executor, children
        for session in range(MOST_SESSIONS):
            tokens = [(7 * place + session) % executor.vocab_size for place in range(CONTEXT)]
            executor.execute([SequenceRows(0, tokens, prefix_of(session), NO_NODES, [])], NO_SAMPLING)

    def seconds(self, sessions: int, leaves: int) -> list[float]:
        """Of each level of a tree in which so many leaves, of all sessions together, get children. Half of a level's
        leaves have two leaves below them."""
        paths: list[list[list[int]]] = [[[]] * (leaves // sessions) for _ in range(sessions)]
        times = list[float]()
        for level in range(LEVELS):
            first = MOST_SESSIONS * CONTEXT + level * leaves
            for session, own in enumerate(paths):
                slots = range(first + session * len(own), first + (session + 1) * len(own))
                paths[session] = [[*own[place // 2], slot] for place, slot in enumerate(slots)]
            began = time.perf_counter()
            self._executor.execute([self._rows(n, own) for n, own in enumerate(paths)], self._sampling(paths))
            times.append(time.perf_counter() - began)
        return times

    def _rows(self, session: int, paths: list[list[int]]) -> SequenceRows:
        depths, table = np.array([len(path) for path in paths]), np.array(paths, np.int32)
        tokens = table[:, -1].astype(np.int64) % self._executor.vocab_size
        return SequenceRows(CONTEXT, [], prefix_of(session), NodeRows(tokens, depths, table), ())

    def _sampling(self, paths: list[list[list[int]]]) -> Sampling:
        sequences = np.repeat(np.arange(len(paths)), [len(own) for own in paths])
        positions = np.full(len(sequences), CONTEXT + len(paths[0][0]))
        params, seeds = [PARAMS] * len(paths), list(range(len(paths)))
        return Sampling(None, params, seeds, sequences, positions, children=self._children)


def prefix_of(session: int) -> Slots:
    return np.arange(session * CONTEXT, (session + 1) * CONTEXT, dtype=np.int32)


def load(backend: Backend, device: str, directory: Path, dtype: DType, threads: int) -> Executor:
    model = EngineConfig(target=directory, dtype=dtype, threads=threads, kv_slots=SLOTS)
    return load_draft(DraftConfig(model=model, listen="", backend=backend, backend_device=device)).executor


def main() -> None:
    """Arguments: a back-end, its device, the draft's directory, a format, threads. Asked for `sessions`, `leaves`."""
    backend, device, directory, dtype, threads = sys.argv[1:]
    name_process(f"levels of {backend}")
    die_with_parent()
    torch.set_num_threads(int(threads))
    leveller = Leveller(load(backend, device, Path(directory), dtype, int(threads)))  # type: ignore[arg-type]
    _answer({})
    for line in sys.stdin:
        _answer({"times": leveller.seconds(**json.loads(line))})


def _answer(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
