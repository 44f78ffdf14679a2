from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from pilotfish.config.fields import Mode
from pilotfish.plan.simulation.models import Cost

#: Rows of a forward of the target.
MAX_ROWS = 1 << 12


class HostCosts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds beside devices' forwards, measured by `pilotfish plan calibrate`."""

    step: float = 0.0  # of the target's loop: each step,
    sequence: float = 0.0  # each sequence in it,
    node: float = 0.0  # and each node of its trees
    level: float = 0.0  # of a draft's loop: each level,
    leaf: float = 0.0  # and each row of it
    waited: float = 0.0  # of a level that the target waits for
    hop: float = 0.0  # of a message to another process

    def of_target(self, cost: Cost) -> Cost:
        return lambda load: (
            cost(load) + self.step + self.sequence * load.sequences + self.node * (load.rows - load.sequences)
        )

    def of_draft(self, cost: Cost) -> Cost:
        return lambda load: cost(load) + self.level + self.leaf * load.rows

    def of_local_draft(self, cost: Cost) -> Cost:
        return lambda load: cost(load) + self.waited


class Speculation(Struct, frozen=True, kw_only=True):
    """Names and defaults are those of EngineConfig."""

    mode: Mode = "off"
    nodes: int = 16  # of a tree that are verified, at most
    levels: int = 4  # sync: forwards of the draft for a tree, at most
    width: int = 4  # sync: leaves of a sequence that a level expands
    leaves: int = 32  # async: of a level, over all sequences
    wanted: int = 2048  # async: nodes of a tree after which it stops growing
    adaptive: bool = True  # whether the budget follows the rule; else every tree is verified in full
    ngrams: bool = False  # whether n-grams guess too


class Setup(Struct, frozen=True, kw_only=True):
    target: Cost  # seconds of its forwards
    draft: Cost | None = None  # None in mode off
    speculation: Speculation = Speculation()
    host: HostCosts = HostCosts()
    targets: int = 1
    pools: int = 1  # async
    delay: float = 0.0  # seconds that a message to a draft on another host takes, one way
    max_requests: int = 256


class LoadItem(Struct, frozen=True):
    sequence: int  # of the trace: its prompt, and where its output begins
    output: int  # tokens
    at: float = 0.0  # seconds: when it comes, at the earliest


class SimulatedLoad(Struct, frozen=True):
    items: Sequence[LoadItem]  # by `at`
    concurrency: int = 0  # at a time, in all; 0: they come when they come


def closed_load(requests: int, concurrency: int, output: int, sequences: int) -> SimulatedLoad:
    """`concurrency` at a time; prompts are those of a trace of `sequences`, in turn."""
    return SimulatedLoad([LoadItem(i % sequences, output) for i in range(requests)], concurrency)


def poisson_load(requests: int, rate: float, output: int, sequences: int, seed: int = 0) -> SimulatedLoad:
    """`rate` a second on average, at random times; prompts as in `closed_load`."""
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, requests)).tolist()
    return SimulatedLoad([LoadItem(i % sequences, output, at) for i, at in enumerate(times)])
