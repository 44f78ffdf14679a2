"""SwiftSpec's figure: tokens/s of its pairs by how many of 8 devices run the target, the draft being on the others, or
both on all in turn. The acceptance is fitted to one published number of a pair."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from msgspec import Struct

from pilotfish.config.hardware.cost import ForwardLoad, Weights, place
from pilotfish.config.hardware.tables import ENGINES, Sourced, read_table
from pilotfish.plan.simulation.acceptance import AcceptanceTrace, drawn_acceptance
from pilotfish.plan.simulation.run import SimulatedRun, simulate
from pilotfish.plan.simulation.setup import HostCosts, Setup, Speculation, closed_load

#: Requests, one at a time, and the tokens of each.
REQUESTS, OUTPUT = 12, 256
#: Seconds of a message between devices of a node: assumed, for a store that another device polls.
DELAY = 5e-6
#: Levels of the draft that are tried where it runs in turn: the source does not say them.
SYNC_LEVELS = (2, 3, 4)
#: Bounds of the acceptance, and halvings between them.
BETWEEN, HALVINGS = (0.2, 0.98), 7


class SplitPair(Sourced, frozen=True, kw_only=True):
    target: str
    draft: str
    tokens: float | None = None  # of a step, published
    rate: float | None = None  # tokens/s, published
    at: int = 0  # devices of the target, of both
    like: str = ""  # the pair whose acceptance it has
    best: tuple[int, ...]  # devices of the target, published; several where the source contradicts itself

    def error(self, point: SplitPoint) -> float:
        """Relative, at the published split: above 0 where the simulation has too much; 0 without a published figure."""
        return point.tokens / self.tokens - 1 if self.tokens else point.rate / self.rate - 1 if self.rate else 0.0


class SplitTable(Struct, frozen=True, forbid_unknown_fields=True):
    engine: str
    device: str
    devices: int
    weights: Weights
    nodes: int
    leaves: int
    context: int
    pairs: dict[str, SplitPair]

    def point(self, pair: SplitPair, acceptance: float, target: int) -> SplitPoint:
        trace = drawn_acceptance(acceptance, sequences=REQUESTS, prompt=self.context, output=OUTPUT)
        if target < self.devices:
            speculation = Speculation(mode="async", leaves=self.leaves, nodes=self.nodes, adaptive=False)
            return self._point(pair, trace, target, speculation)
        settings = [
            Speculation(mode="sync", levels=levels, width=self.leaves, nodes=self.nodes, adaptive=False)
            for levels in SYNC_LEVELS
        ]
        return max((self._point(pair, trace, target, one) for one in settings), key=lambda point: point.rate)

    def _point(self, pair: SplitPair, trace: AcceptanceTrace, count: int, speculation: Speculation) -> SplitPoint:
        engine = ENGINES[self.engine]
        placed = partial(place, engine=engine, weights=self.weights)
        target = placed(f"{pair.target}@{self.device}x{count}").seconds
        draft = placed(f"{pair.draft}@{self.device}x{self.devices - count or self.devices}").seconds
        host = HostCosts(step=engine.round.value, level=engine.level.value)
        delay = DELAY if count < self.devices else 0.0
        setup = Setup(target=target, draft=draft, speculation=speculation, host=host, delay=delay)
        run = simulate(setup, trace, closed_load(REQUESTS, 1, OUTPUT, REQUESTS))
        verify, level = (ForwardLoad(rows=rows, context=self.context) for rows in (self.nodes + 1, self.leaves))
        return SplitPoint(count, decode_rate(run), run.tokens_per_step, target(verify), draft(level))


class SplitPoint(Struct, frozen=True):
    target: int  # devices
    rate: float  # tokens/s of a request, from its first token
    tokens: float  # of a step
    verify: float  # seconds of a forward of the target over its tree
    level: float  # seconds of a forward of the draft


class SplitCurve(Struct, frozen=True):
    acceptance: float
    points: list[SplitPoint]  # from one device for the target to all of them, in turn

    @property
    def best(self) -> SplitPoint:
        """Only even numbers of devices for each model, which is what its engine can do."""
        return max((point for point in self.points[:-1] if point.target % 2 == 0), key=lambda point: point.rate)

    def behind(self, target: int) -> float:
        """Relative gain of a split over the best: 0 or less."""
        return self.points[target - 1].rate / self.best.rate - 1


SPLITS = read_table(__file__, "device_splits", SplitTable)


def decode_rate(run: SimulatedRun) -> float:
    seconds = sum(times.ended - times.first for times in run.requests)
    return sum(times.tokens - 1 for times in run.requests) / seconds


def runs_of(table: SplitTable) -> int:
    fitted = sum(not pair.like for pair in table.pairs.values())
    return HALVINGS * fitted + len(table.pairs) * table.devices


def curves(table: SplitTable, done: Callable[[], None]) -> dict[str, SplitCurve]:
    own = {name: fitted(table, pair, done) for name, pair in table.pairs.items() if not pair.like}
    return {name: _curve(table, pair, own, name, done) for name, pair in table.pairs.items()}


def _curve(
    table: SplitTable, pair: SplitPair, own: Mapping[str, float], name: str, done: Callable[[], None]
) -> SplitCurve:
    acceptance, points = own[pair.like or name], []
    for target in range(1, table.devices + 1):
        points.append(table.point(pair, acceptance, target))
        done()
    return SplitCurve(acceptance, points)


def fitted(table: SplitTable, pair: SplitPair, done: Callable[[], None]) -> float:
    (low, high), errors = BETWEEN, dict[float, float]()
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        errors[middle] = pair.error(table.point(pair, middle, pair.at))
        low, high = (low, middle) if errors[middle] > 0 else (middle, high)
        done()
    return min(errors, key=lambda acceptance: abs(errors[acceptance]))
