"""An executor in virtual time: a scripted model, and forwards that take as long as a function of their rows says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pilotfish.core.cache.slots import Slots
from pilotfish.core.sampling.noise import gumbel
from pilotfish.core.scheduling.executor import ANY_DEPTH, ForwardSeconds, Outcome, Sampling, SequenceRows
from pilotfish.core.trees.tree import Floats
from pilotfish.plan.events import VirtualClock

#: Logits [vocab] of the token after these, the whole sequence.
ScriptedModel = Callable[[Sequence[int]], Floats]
#: Spread of a target's log-probabilities about a draft's (`model/sampling.py`).
NOISE_SCALE = 0.5


@dataclass
class ScriptedExecutor:
    """Implements `Executor` without rules and filters. The KV is the token and the position written to each slot: a
    row's history comes from the slots alone, and one that holds another position than its place says is an error."""

    model: ScriptedModel
    vocab_size: int
    num_slots: int
    context: int
    seconds: Callable[[int], float]
    clock: VirtualClock

    deepest = ANY_DEPTH

    def __post_init__(self) -> None:
        self._tokens = np.zeros(self.num_slots, np.int64)
        self._positions = np.full(self.num_slots, -1)

    def padded(self, rows: int) -> int:
        return rows

    def execute(self, rows: Sequence[SequenceRows], sampling: Sampling) -> Outcome:
        for sequence in rows:
            self._write(sequence)
        logits = np.array([self.model(history) for sequence in rows for history in self._histories(sequence)])
        seconds = self.seconds(sum(sequence.num_rows for sequence in rows))
        self.clock.now += seconds
        if not len(sampling):
            return Outcome(np.zeros(0, np.int64), seconds=ForwardSeconds(model=seconds))
        sampled = range(len(sampling)) if sampling.rows is None else sampling.rows.tolist()
        scores = np.array([_score(logits[row], sampling, index) for index, row in enumerate(sampled)])
        tokens, log_chances = scores.argmax(axis=1), None
        if sampling.children:
            tokens = np.argsort(-scores, axis=1, kind="stable")[:, : sampling.children]
            best = np.take_along_axis(scores, tokens, axis=1)
            log_chances = np.where(sampling.greedy[:, None], best, _log_softmax(best / NOISE_SCALE))
        return Outcome(tokens, log_chances, seconds=ForwardSeconds(model=seconds))

    def _write(self, sequence: SequenceRows) -> None:
        own = sequence.prefix_slots[sequence.start :]
        self._tokens[own], self._positions[own] = sequence.tokens, np.arange(sequence.start, sequence.start + len(own))
        if len(sequence.nodes):
            slots = sequence.nodes.slots
            self._tokens[slots] = sequence.nodes.tokens
            self._positions[slots] = len(sequence.prefix_slots) - 1 + sequence.nodes.depths

    def _histories(self, sequence: SequenceRows) -> Iterator[list[int]]:
        """Tokens up to each kept row."""
        prefix = self._read(sequence.prefix_slots)
        for offset in sequence.kept:
            yield prefix[: sequence.start + offset + 1]
        for path, depth in zip(sequence.nodes.paths, sequence.nodes.depths.tolist(), strict=True):
            yield self._read(np.concatenate((sequence.prefix_slots, path[:depth])))

    def _read(self, slots: Slots) -> list[int]:
        assert np.array_equal(self._positions[slots], np.arange(len(slots))), "a slot holds another position"
        tokens: list[int] = self._tokens[slots].tolist()
        return tokens


def _score(logits: Floats, sampling: Sampling, index: int) -> Floats:
    sequence = int(sampling.sequences[index])
    params = sampling.params[sequence]
    if params.greedy:
        return _log_softmax(logits)
    return logits / params.temperature + gumbel(sampling.seeds[sequence], int(sampling.positions[index]), len(logits))


def _log_softmax(values: Floats) -> Floats:
    """Over the last axis."""
    result: Floats = values - np.logaddexp.reduce(values, axis=-1, keepdims=True)
    return result
