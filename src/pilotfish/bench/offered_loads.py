"""Loads of an engine: sequences that decode, prompts that arrive as a Poisson process; loads shared by engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, takewhile
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from pilotfish.bench.workload import Prompt
from pilotfish.core.prefilling.handover import HandOverReport
from pilotfish.core.trees.tree import Ints


class ArrivingPrompt(Struct, frozen=True):
    at: float  # seconds after the measurement's beginning
    tokens: list[int]


class OfferedLoad(Struct, frozen=True):
    streams: list[list[int]]  # prompts of sequences that decode all the while
    arrivals: list[ArrivingPrompt]  # ascending
    seconds: float  # in which times are taken; prompts that have arrived are computed to their end
    new_tokens: int  # of each arrival
    rows: int  # of a step, at most
    salt: str  # KV of loads with others is not found


class LoadedRun(Struct, frozen=True):
    """What came of a load."""

    began: float  # of its seconds, a moment of the host's clock
    seconds: float
    gaps: list[float]  # milliseconds between a stream's tokens
    first_tokens: list[float]  # milliseconds of each arrival, from when it was due to its first token
    outputs: list[list[int]]  # of each arrival
    tokens: int  # within the seconds, of streams and arrivals
    handovers: list[HandOverReport]
    forwards: int = 0  # of paced targets
    overruns: int = 0  # of them, those that took longer than their pace

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def tokens_of(prompts: Sequence[Prompt], tokenizer: Any) -> list[int]:
    """Of all prompts' texts, one after another."""
    texts = (row.text if isinstance(row.text, str) else tokenizer.decode(row.text) for row in prompts)
    return list(chain.from_iterable(map(tokenizer.encode, texts)))


class TokenRing:
    """Prompts of any length, cut out of one text that begins again at its end."""

    def __init__(self, tokens: Sequence[int], seed: int) -> None:
        self._tokens: Ints = np.asarray(tokens, np.int64)
        self._random = np.random.default_rng(seed)

    def cut(self, length: int) -> list[int]:
        """Beginning anywhere: two prompts share no beginning but by chance."""
        first = int(self._random.integers(len(self._tokens)))
        taken: list[int] = np.take(self._tokens, range(first, first + length), mode="wrap").tolist()
        return taken


def arrival_times(rate: float, seed: int, burstiness: float = 1.0) -> Iterator[float]:
    """Times of arrivals without end, `rate` a second in the mean. Intervals are gamma distributed with this shape: 1 is
    a Poisson process, below it arrivals come in bursts, above it more evenly. One seed gives the same times for all
    rates, but for their distance."""
    random, at = np.random.default_rng(seed), 0.0
    while True:
        at += float(random.standard_gamma(burstiness)) / (burstiness * rate)
        yield at


def poisson_times(rate: float, seconds: float, seed: int) -> Iterator[float]:
    """Times of arrivals within so many seconds, `rate` a second in the mean."""
    return takewhile(lambda at: at < seconds, arrival_times(rate, seed))


def split_load(load: OfferedLoad, parts: int) -> list[OfferedLoad]:
    """Streams and arrivals in turn."""
    return [replace(load, streams=load.streams[i::parts], arrivals=load.arrivals[i::parts]) for i in range(parts)]


def joined_runs(runs: Sequence[LoadedRun]) -> LoadedRun:
    """Of the parts of a load that was split. Arrivals are in the load's order again."""
    total = sum(len(run.outputs) for run in runs)
    places = [(i % len(runs), i // len(runs)) for i in range(total)]
    return LoadedRun(
        began=min(run.began for run in runs),
        seconds=max(run.seconds for run in runs),
        gaps=[gap for run in runs for gap in run.gaps],
        first_tokens=[runs[part].first_tokens[i] for part, i in places],
        outputs=[runs[part].outputs[i] for part, i in places],
        tokens=sum(run.tokens for run in runs),
        handovers=[report for run in runs for report in run.handovers],
        forwards=sum(run.forwards for run in runs),
        overruns=sum(run.overruns for run in runs),
    )
