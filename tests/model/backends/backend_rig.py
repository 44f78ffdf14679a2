"""Both back-ends over the bundled draft, beside our own executor over the same weights."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from sizes import in_soak

from pilotfish.cli import main
from pilotfish.core.scheduling.executor import NO_NODES, NodeRows, SequenceRows
from pilotfish.engine import pairs
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.loading.loader import load_model

SLOTS = 512
PAIR = pairs.resolve_pair("pycode")
VOCAB = 4096
LISTEN = ("--listen", "tcp://127.0.0.1:*")


def _has(*modules: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(any(find_spec(module) is None for module in modules), reason=f"needs {modules}")


HAS_OPENVINO = _has("openvino")
#: llama.cpp's bindings are built from source, for minutes: only the soak installs them.
BACKENDS = [
    pytest.param("openvino", marks=HAS_OPENVINO),
    pytest.param("llama.cpp", marks=[in_soak, _has("llama_cpp", "gguf")]),
]


def made(backend: str, slots: int = SLOTS, directory: Path = PAIR.draft, vocab: int = VOCAB) -> Any:
    if backend == "openvino":
        from pilotfish.model.backends.openvino_executor import OpenVINOExecutor

        return OpenVINOExecutor(directory, "CPU", "float32", slots, 1, vocab)
    from pilotfish.model.backends.gguf_file import gguf_of
    from pilotfish.model.backends.llama_cpp_executor import LlamaCppExecutor

    return LlamaCppExecutor(gguf_of(directory, "f32"), slots, 1, vocab, wide_kv=True)


@cache
def shared(backend: str) -> Any:
    """One for many tests: conversion takes seconds, and what was in slots before is of no matter."""
    return made(backend, 2048)


def own(slots: int = SLOTS, directory: Path = PAIR.draft) -> TorchExecutor:
    return TorchExecutor(load_model(directory, torch.float32, torch.device("cpu"), eager=False), slots)


def refused(capfd: pytest.CaptureFixture[str], *arguments: object) -> str:
    capfd.readouterr()
    assert main(["draft", *map(str, arguments), *LISTEN]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("pilotfish: ")]
    assert len(lines) == 1
    return lines[0]


@dataclass
class Followed:
    tokens: list[int]
    slots: list[int] = field(default_factory=list)
    nodes: dict[tuple[int, ...], int] = field(default_factory=dict)  # slots by paths of tokens


class Traffic:
    """Sequences that begin alike or not, grow trees, get tokens, end; their slots are used again."""

    def __init__(self, seed: int, slots: int = SLOTS, vocab: int = VOCAB) -> None:
        self.draw, self.vocab = Random(seed), vocab
        self.free = list(range(slots))
        self.draw.shuffle(self.free)
        self.sequences: list[Followed] = []

    def _take(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def forwards(self, count: int) -> Iterator[list[SequenceRows]]:
        for _ in range(count):
            if len(self.sequences) < 3 and len(self.free) > 80:
                self._open()
            rows = [row for row in map(self._rows, self.sequences) if row is not None]
            if rows:
                yield rows
            for sequence in list(self.sequences):
                self._go_on(sequence)

    def _open(self) -> None:
        sequence = Followed([self.draw.randrange(self.vocab) for _ in range(2 + self.draw.randrange(20))])
        if self.sequences and self.draw.random() < 0.5:
            other = self.draw.choice(self.sequences)
            length = self.draw.randrange(len(other.slots) + 1)
            sequence.tokens = other.tokens[:length] + sequence.tokens
            sequence.slots = other.slots[:length]
        self.sequences.append(sequence)

    def _rows(self, sequence: Followed) -> SequenceRows | None:
        start = len(sequence.slots)
        if missing := len(sequence.tokens) - start:
            sequence.slots = sequence.slots + self._take(missing)
            slots = np.array(sequence.slots, np.int32)
            return SequenceRows(start, sequence.tokens[start:], slots, NO_NODES, [missing - 1])
        leaves = self.draw.sample([(), *sequence.nodes], min(4, 1 + len(sequence.nodes)))
        fresh = [
            path for path in ((*leaf, self.draw.randrange(self.vocab)) for leaf in leaves) if path not in sequence.nodes
        ]
        fresh = fresh[: len(self.free)]
        if not fresh:
            return None
        for path in fresh:
            (sequence.nodes[path],) = self._take(1)
        paths = np.zeros((len(fresh), max(map(len, fresh))), np.int32)
        for row, path in enumerate(fresh):
            paths[row, : len(path)] = [sequence.nodes[path[: n + 1]] for n in range(len(path))]
        tokens, depths = np.array([path[-1] for path in fresh]), np.array([len(path) for path in fresh])
        return SequenceRows(start, [], np.array(sequence.slots, np.int32), NodeRows(tokens, depths, paths), [])

    def _go_on(self, sequence: Followed) -> None:
        if sequence.nodes and self.draw.random() < 0.5:
            path = self.draw.choice(list(sequence.nodes))
            accepted = [sequence.nodes.pop(path[: n + 1]) for n in range(len(path))]
            sequence.slots = sequence.slots + accepted
            self.free += sequence.nodes.values()
            sequence.nodes = {}
            sequence.tokens = [*sequence.tokens, *path, self.draw.randrange(self.vocab)]
        if len(sequence.tokens) > 60:
            self.sequences.remove(sequence)
            others = {slot for other in self.sequences for slot in other.slots}
            self.free += {*sequence.slots, *sequence.nodes.values()} - others


def compare(theirs: Any, ours: Any, traffic: Traffic, forwards: int, tolerance: float = 2e-3) -> None:
    rows = compared = 0
    for forward in traffic.forwards(forwards):
        found, expected = theirs.logits(forward), ours.forward(forward)
        assert found.shape == expected.shape and found.shape[1] == traffic.vocab
        assert (found - expected).abs().max() < tolerance
        top = expected.topk(2).values
        clear = top[:, 0] - top[:, 1] > 2 * tolerance
        assert (found.argmax(1) == expected.argmax(1))[clear].all()
        rows, compared = rows + sum(sequence.num_rows for sequence in forward), compared + int(clear.sum())
    assert rows > 3 * forwards and compared > forwards
