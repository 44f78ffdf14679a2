"""Draft pools and prefill pools as a simulated target uses them."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pilotfish.core.prefilling.prefill_pools import BESIDE, BESIDE_QUEUED, FEW

#: Seconds over which a load is averaged.
AVERAGED = 10.0


@dataclass(frozen=True)
class Guessing:
    """Nodes and tokens of a step, where drafts keep up."""

    nodes: float  # of each sequence
    tokens: float  # that each commits, in the mean


NO_GUESSES = Guessing(0.0, 1.0)


@dataclass(frozen=True)
class Acceptance:
    """Tokens that a sequence gains a step from so many verified nodes: straight lines between what was measured, and
    nothing more beyond. Sequences differ: what one commits a step is gamma distributed about the mean."""

    gains: Sequence[tuple[float, float]]  # nodes, tokens; ascending
    spread: float  # standard deviation over mean

    def gain(self, nodes: float) -> float:
        rows = [0.0, *(row for row, _ in self.gains)]
        return float(np.interp(nodes, rows, [0.0, *(tokens for _, tokens in self.gains)]))


@dataclass(frozen=True)
class DraftPlan:
    leaves: float  # a second, that a pool's devices expand
    slots: int  # tokens whose KV they hold
    read_seconds: float  # for each token of a prompt


class Average:
    """Of something a second, over the last `AVERAGED` seconds or so."""

    def __init__(self) -> None:
        self._sum, self._at = 0.0, 0.0

    def add(self, amount: float, now: float) -> None:
        self._sum, self._at = self.at(now) * AVERAGED + amount, now

    def at(self, now: float) -> float:
        return self._sum * math.exp((self._at - now) / AVERAGED) / AVERAGED


class SimulatedDrafts:
    """A draft pool of some targets. A sequence gets its share of the leaves that are not spent on prompts, and none
    where its context does not fit beside the others."""

    def __init__(self, plan: DraftPlan, acceptance: Acceptance) -> None:
        self.sessions = 0
        self.context = 0  # tokens of all sessions
        self.read_seconds = 0.0  # so far
        self._plan, self._acceptance = plan, acceptance
        self._reading = Average()
        self._share = 1.0  # of its time that prompts leave

    def changed(self, sequences: int, context: int) -> None:
        """So many sequences more decode, whose contexts have so many tokens more."""
        self.sessions += sequences
        self.context += context

    def read(self, tokens: int, now: float) -> None:
        """`tokens` of a prompt are not in the prefix cache."""
        self.read_seconds += tokens * self._plan.read_seconds
        self._reading.add(tokens * self._plan.read_seconds, now)
        self._share = max(1.0 - self._reading.at(now), 0.0)

    def guess(self, wanted: Guessing, seconds: float) -> Guessing:
        """Of each sequence, in steps of so many seconds."""
        grown = self._plan.leaves * self._share * seconds / self.sessions
        there = min(self._plan.slots / self.context, 1.0)
        if grown >= wanted.nodes and there == 1:
            return wanted
        nodes = min(grown, wanted.nodes)
        return Guessing(there * nodes, 1 + there * self._acceptance.gain(nodes))


@dataclass(frozen=True)
class PrefillPlan:
    token_seconds: float  # of a worker
    transfer_seconds: float  # for each token, of which nothing is hidden


class SimulatedPrefills:
    """Prefill workers: each computes one prompt after the other, whoever is free first."""

    def __init__(self, plan: PrefillPlan, workers: int) -> None:
        self.busy_seconds = 0.0
        self._plan = plan
        self._free_at = [0.0] * workers

    def takes(self, tokens: int, here: float, neighbours: int, now: float) -> float | None:
        """When a prompt's KV will have come, where the rule of `core/prefilling/prefill_pools.py` prefers that to
        `here` seconds on the target beside so many sequences that decode."""
        seconds = tokens * self._plan.token_seconds
        begins = max(self._free_at[0], now)
        comes = begins + seconds + tokens * self._plan.transfer_seconds
        alone, there = comes - begins, comes - now
        sooner = alone <= BESIDE * here and there <= BESIDE_QUEUED * here if neighbours else there <= here
        if tokens <= FEW or not sooner:
            return None
        heapq.heapreplace(self._free_at, begins + seconds)
        self.busy_seconds += seconds
        return comes
