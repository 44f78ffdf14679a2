"""A trained head far from its target: what is accepted of its guesses over lines that are slow, lose frames, or carry
rounded features; and what features take on the wire.

Target, head and line are in one process and in virtual time: a step and a level take so long, whatever they cost here.
So nothing depends on the speed of a machine, and a run can be repeated to the token.

    virtual time    ├── a step of the target ──┤ commit    features and Commit ──► arrive after half a round trip
    meanwhile       ├ level ┤├ level ┤├ level ┤           each level's Trees ──► likewise
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, cast

import numpy as np

from pilotfish.bench.acceptance import acceptance
from pilotfish.bench.contestants import Contestant
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.report import ProgressBar, Report, Row
from pilotfish.bench.workload import TEMPERATURES, Prompt, jobs_at
from pilotfish.core.cache.prefix_cache import PrefixCache
from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.drafting.connected_targets import DraftIdentity
from pilotfish.core.drafting.draft_machine import DraftMachine
from pilotfish.core.drafting.draft_sessions import LevelPart
from pilotfish.core.drafting.drafter import Drafter, DraftLimits
from pilotfish.core.drafting.level_choice import LevelShape
from pilotfish.core.drafting.messages import PROTOCOL_VERSION, FeatureOffer, FeatureRows, Hello, Peer
from pilotfish.core.drafting.pools import DraftPool
from pilotfish.core.drafting.session_table import SessionTable
from pilotfish.core.drafting.target_machine import RemoteOptions
from pilotfish.core.features.feature_intake import FeatureNeed
from pilotfish.core.features.feature_rows import FEATURE_TYPES, ITEM_BYTES, LARGEST, FeatureType
from pilotfish.core.scheduling.budget import FixedBudget
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.lookahead import NewNodes
from pilotfish.core.trees.tree import Guesses
from pilotfish.engine.drafts.remote_drafts import RemoteDrafter
from pilotfish.engine.engine import Engine
from pilotfish.engine.heads import ConfiguredHead
from pilotfish.errors import EngineError, ParameterError
from pilotfish.model.heads.executor import HeadExecutor, HeadSetup
from pilotfish.wire.channel import Channel, Received, decode_to_draft
from pilotfish.workers.draft import DraftWorker, Grower

#: Virtual seconds of a target's step and of a head's level: of a model of 70 billion weights, and of one layer of it.
STEP, LEVEL = 0.0104, 0.001
#: Of a level of a head on a slow device, or of one that other targets keep busy.
SLOW_LEVEL = 0.0026
#: There and back of a line to the next host, and of a slow one.
NEAR, FAR = 0.0002, 0.020
#: Share of frames that a bad line loses.
LOST = 0.01
POOL, TARGET = b"0", b"target"
#: That each leaf gets.
CHILDREN = 12
#: Frames in order, and when they arrive.
UnderWay: TypeAlias = "deque[tuple[float, Received]]"


@dataclass(frozen=True)
class LineKind:
    """What is between target and head, and how slow the head is."""

    name: str
    dtype: FeatureType = "float32"
    round_trip: float = 0.0
    lost: float = 0.0  # share of frames
    of_features: bool = False  # only of those
    resent: bool = False  # what is lost comes a round trip later, and what follows it waits: TCP
    level: float = LEVEL  # seconds


def line_kinds() -> list[LineKind]:
    """The first one is a head beside its target."""
    return [
        LineKind("beside the target"),
        *(LineKind(f"next host, {dtype}", dtype, NEAR) for dtype in FEATURE_TYPES),
        LineKind("next host, 1 % of features lost", "bfloat16", NEAR, LOST, of_features=True),
        LineKind("next host, 1 % of all lost", "bfloat16", NEAR, LOST),
        LineKind("next host, slow levels", "bfloat16", NEAR, level=SLOW_LEVEL),
        LineKind("20 ms", "bfloat16", FAR),
        LineKind("20 ms, 1 % of features lost", "bfloat16", FAR, LOST, of_features=True),
        LineKind("20 ms, 1 % of all resent", "bfloat16", FAR, LOST, resent=True),
    ]


@dataclass
class VirtualLine:
    """A draft worker's channel, and the way back, of frames that arrive when they are due."""

    kind: LineKind
    draft_now: float = 0.0  # the head's clock: it lags behind the target's, or is a level ahead
    payload: int = 0  # bytes of rows and scales that were sent
    framed: int = 0  # of the frames around them
    tokens: int = 0  # whose features they were
    row_bytes: int = 1
    _to_draft: UnderWay = field(default_factory=deque)
    _to_target: UnderWay = field(default_factory=deque)
    _random: np.random.Generator = field(default_factory=partial(np.random.default_rng, 0))

    def post(self, now: float, frames: Sequence[bytes]) -> None:
        """From the target."""
        for frame in frames:
            message = decode_to_draft(frame)
            if features := isinstance(message, FeatureRows):
                self.payload += len(message.rows) + len(message.scales)
                self.framed += len(frame)
                self.tokens += len(message.rows) // self.row_bytes
            self._put(self._to_draft, now, Received(TARGET, frame), features or not self.kind.of_features)

    def send(self, peer: Peer, *frames: bytes) -> bool:  # noqa: ARG002
        """From the head."""
        for frame in frames:
            self._put(self._to_target, self.draft_now, Received(POOL, frame), not self.kind.of_features)
        return True

    def _put(self, queue: UnderWay, now: float, received: Received, may_be_lost: bool) -> None:
        due = now + self.kind.round_trip / 2
        if may_be_lost and self._random.random() < self.kind.lost:
            if not self.kind.resent:
                return
            due += self.kind.round_trip
        queue.append((max(due, queue[-1][0]) if queue else due, received))

    def receive(self, timeout: float) -> list[Received]:  # noqa: ARG002
        return _due(self._to_draft, self.draft_now)

    def arrived(self, now: float) -> list[Received]:
        """At the target."""
        return _due(self._to_target, now)

    def next_arrival(self, until: float) -> float:
        """When the head has a frame to read, or `until`."""
        return min(self._to_draft[0][0], until) if self._to_draft else until

    def wake(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is held."""


def _due(queue: UnderWay, now: float) -> list[Received]:
    frames = []
    while queue and queue[0][0] <= now:
        frames.append(queue.popleft()[1])
    return frames


@dataclass
class VirtualGrower(Grower):
    """Its levels take their virtual time."""

    line: VirtualLine | None = None

    def grow(self, level: Sequence[LevelPart]) -> list[NewNodes]:
        added = super().grow(level)
        assert self.line is not None
        self.line.draft_now += self.line.kind.level
        return added


class VirtualDrafter(RemoteDrafter):
    """Before each of its target's steps, the head does what it had the time for during the last one."""

    def __init__(self, engine: Engine, executor: HeadExecutor, kind: LineKind) -> None:
        width = engine.executor.feature_width
        self.line = line = VirtualLine(kind, row_bytes=width * ITEM_BYTES[kind.dtype])
        self.now = 0.0
        offer = FeatureOffer("bench", width, kind.dtype)
        hello = Hello(PROTOCOL_VERSION, "bench", engine.model.config.vocab_size, "target", features=offer)
        options, pool = RemoteOptions(engine.config.wanted), DraftPool("head", POOL)
        super().__init__(hello, [pool], self._sent, options, clock=lambda: self.now, source=engine.executor)
        slots, shape = SlotPool(executor.num_slots), LevelShape(engine.config.leaves, CHILDREN)
        table, need = SessionTable(slots, PrefixCache(slots)), FeatureNeed(("bench",), width)
        identity = DraftIdentity("head", "bench", {})
        machine = DraftMachine(identity, table, shape, executor.context, features=need)
        grower = VirtualGrower(executor, table, CHILDREN, line=line)
        self.worker = DraftWorker(machine, grower, cast(Channel, line), lambda: line.draft_now)
        self._greet(pool)

    def _sent(self, peer: Peer, *frames: bytes) -> None:  # noqa: ARG002
        self.line.post(self.now, frames)

    def _greet(self, pool: DraftPool) -> None:
        while not pool.ready:
            if self.now > 60.0:
                raise EngineError(f"the head does not answer: {pool.refusal}")
            self.now += STEP
            self._catch_up()

    def _catch_up(self) -> None:
        """The head works up to the present time."""
        self.tick()
        while self.line.draft_now < self.now:
            if not self.worker.turn(0.0):
                self.line.draft_now = max(self.line.next_arrival(self.now), self.line.draft_now)
                if self.line.draft_now >= self.now:
                    break
        for received in self.line.arrived(self.now):
            self.receive(received)

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[Guesses]:
        self._catch_up()
        return super().propose(requests, limits)

    def flush(self) -> None:
        self.now += STEP
        super().flush()


@dataclass(frozen=True)
class HeadGround:
    """A target that makes features for a head, and the head's executor."""

    engine: Engine
    executor: HeadExecutor
    prompts: list[Prompt]
    options: BenchOptions
    progress: ProgressBar

    def play(self, kind: LineKind, temperature: float) -> Row:
        """What is accepted over a line of the kind, and what it carries."""
        made = list[VirtualDrafter]()

        def drafter() -> Drafter:
            made.append(VirtualDrafter(self.engine, self.executor, kind))
            return made[-1]

        jobs = jobs_at(self.prompts, temperature, self.options.max_tokens)
        contestant = Contestant(drafter, partial(FixedBudget, self.engine.config.nodes, self.engine.config.levels))
        done = partial(self.progress, f"{kind.name}, T={temperature:g}")
        run = contestant.run(self.engine, jobs, self.options.concurrency, done)
        line, width = made[0].line, self.engine.executor.feature_width
        return {
            "line": kind.name,
            "temperature": temperature,
            **acceptance(run),
            "bytes_per_token": line.payload / line.tokens,
            "computed_bytes_per_token": width * ITEM_BYTES[kind.dtype] + (4 if kind.dtype in LARGEST else 0),
            "framed_bytes_per_token": line.framed / line.tokens,
            "resyncs": made[0].worker.machine.counts.resyncs,
        }


def run_features(options: BenchOptions, progress: ProgressBar) -> Report:
    """Every prompt over every line, at both temperatures; each beside what a head beside its target gets."""
    config, prompts, kinds = options.engine_config(), options.rows(), line_kinds()
    progress.total = len(kinds) * len(TEMPERATURES) * len(prompts)
    rows = list[Row]()
    with Engine(config) as engine:
        if config.draft is None or not engine.executor.feature_width:
            raise ParameterError("draft", str(config.draft), "a trained head")
        ground = HeadGround(engine, _executor_of(engine), prompts, options, progress)
        for temperature in TEMPERATURES:
            found = [ground.play(kind, temperature) for kind in kinds]
            local = found[0]["tokens_per_verify_step"]
            rows += [row | {"over_local": row["tokens_per_verify_step"] / local} for row in found]
    return Report({"lines": rows, "step_ms": 1000 * STEP, "level_ms": 1000 * LEVEL, "slow_level_ms": 1000 * SLOW_LEVEL})


def _executor_of(engine: Engine) -> HeadExecutor:
    config = engine.config
    assert config.features is not None  # as in every engine whose draft is a head
    files = ConfiguredHead.of(config, config.features, config.target).read()
    model = engine.model
    setup = HeadSetup(model.device, model.dtype, engine.memory.slots, config.eager, model.config.vocab_size)
    return files.executor(setup)
