"""An executor in virtual time: a scripted model, forwards that cost what a table says. No device, no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pilotfish.core.cache.slots import Slots
from pilotfish.core.sampling.noise import gumbel
from pilotfish.core.scheduling.executor import ANY_DEPTH, ForwardSeconds, Outcome, Sampling, SequenceRows, TokenLogprobs
from pilotfish.core.trees.tree import Floats, Ints
from pilotfish.errors import EngineError

#: Logits [vocab] of the token after these, the whole sequence.
ScriptedModel = Callable[[Sequence[int]], Floats]
#: Spread of a target's log-probabilities about a draft's (`model/sampling.py`).
NOISE_SCALE = 0.5


@dataclass
class VirtualClock:
    """Seconds since the simulation began."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class SimulatedExecutor:
    """Implements `core.executor.Executor`. A forward of n rows advances `clock` by `seconds(n)`. The KV is the token
    and the position written to each slot: a row is given its history from the slots alone, and EngineError shows a slot
    that holds another position than its place says."""

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

        def logprobs(kept: Sequence[int], tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
            return [_token_logprobs(logits[row], token, top) for row, token in zip(kept, tokens, strict=True)]

        tokens, log_chances = _sampled(logits, sampling)
        return Outcome(tokens, log_chances, (), logprobs, ForwardSeconds(model=seconds))

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
        wrong = np.flatnonzero(self._positions[slots] != np.arange(len(slots)))
        if len(wrong):
            raise EngineError(f"slots: {slots[wrong[0]]} does not hold the token at position {wrong[0]}")
        tokens: list[int] = self._tokens[slots].tolist()
        return tokens


def _sampled(logits: Floats, sampling: Sampling) -> tuple[Ints, Floats | None]:
    """Shared-noise sampling at a temperature; NotImplementedError for rules and filters."""
    if not len(sampling):
        return np.zeros(0, np.int64), None
    rows = range(len(sampling)) if sampling.rows is None else sampling.rows.tolist()
    scores = np.array([_score(logits[row], sampling, index) for index, row in enumerate(rows)])
    if not sampling.children:
        return scores.argmax(axis=1), None
    tokens = np.argsort(-scores, axis=1, kind="stable")[:, : sampling.children]
    best = np.take_along_axis(scores, tokens, axis=1)
    return tokens, np.where(sampling.greedy[:, None], best, _log_softmax(best / NOISE_SCALE))


def _log_softmax(values: Floats) -> Floats:
    """Over the last axis."""
    result: Floats = values - np.logaddexp.reduce(values, axis=-1, keepdims=True)
    return result


def _score(logits: Floats, sampling: Sampling, index: int) -> Floats:
    sequence = int(sampling.sequences[index])
    params, edits = sampling.params[sequence], sampling.edits[index] if sampling.edits else None
    if edits is not None or params.top_k or params.top_p < 1 or params.min_p:
        raise NotImplementedError("a simulated executor knows temperatures only, no filters and no rules on logits")
    if params.greedy:
        return _log_softmax(logits)
    return logits / params.temperature + gumbel(sampling.seeds[sequence], int(sampling.positions[index]), len(logits))


def _token_logprobs(logits: Floats, token: int, top: int) -> TokenLogprobs:
    log_probs = _log_softmax(logits)
    best = np.argsort(-log_probs, kind="stable")[:top]
    rank = 1 + int(np.count_nonzero(log_probs > log_probs[token]))
    return TokenLogprobs(token, float(log_probs[token]), rank, tuple((int(t), float(log_probs[t])) for t in best))
