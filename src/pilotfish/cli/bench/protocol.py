"""What the draft protocol costs beside forwards: bytes and microseconds of both sides, by what the draft asks for. The
draft's executor is scripted, and frames go from hand to hand: nothing is loaded, and nobody waits."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from pilotfish.cli.bench.contestants import take_turns
from pilotfish.cli.bench.options import BenchOptions
from pilotfish.cli.bench.report import ProgressBar, Report, Row, Spread, ratios
from pilotfish.cli.bench.workload import parse_numbers
from pilotfish.config.engine import EngineConfig
from pilotfish.config.workers import DraftConfig
from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.drafting import messages
from pilotfish.core.drafting.connected_targets import DraftIdentity
from pilotfish.core.drafting.draft_machine import DraftMachine
from pilotfish.core.drafting.draft_sessions import SessionTable
from pilotfish.core.drafting.drafter import DraftLimits
from pilotfish.core.drafting.level_choice import LevelShape
from pilotfish.core.drafting.messages import PROTOCOL_VERSION, TARGET_CAPABILITIES, Hello
from pilotfish.core.drafting.pools import DraftPool
from pilotfish.core.drafting.target_machine import RemoteOptions
from pilotfish.core.peers.fields import Peer
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import ANY_DEPTH, Outcome, Sampling, SequenceRows
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.tree import ROOT, Forest, Guesses
from pilotfish.wire.channel import Received
from pilotfish.wire.pool_users import RemoteDrafter
from pilotfish.workers.draft import DraftWorker, Grower

VOCAB, PROMPT = 32_000, 200
STEPS, WARM_STEPS, LEVELS = 60, 10, 3  # of a round; levels are of a step
SLOTS = 1 << 16
TARGET, POOL = b"target", b"pool"
LIMITS = DraftLimits(nodes=16, total=1 << 20, levels=LEVELS, price=0.0)
#: What a draft asks for, by name; the first is that with which others are compared.
ASKED = {
    "six messages": (),
    "errors, pauses, progress": (messages.PREFIX_KEYS, messages.ERRORS, messages.PAUSES, messages.PROGRESS),
    "feedback too": (messages.PREFIX_KEYS, messages.ERRORS, messages.PAUSES, messages.PROGRESS, messages.FEEDBACK),
}


def run_protocol(options: BenchOptions, progress: ProgressBar) -> Report:
    numbers = parse_numbers("concurrency", options.concurrencies)
    progress.total = len(numbers) * len(ASKED) * (options.repeats + 1)
    rows: list[Row] = []
    for number in numbers:
        kinds = {name: partial(_play, number, asked) for name, asked in ASKED.items()}
        rounds = take_turns(kinds, range(options.repeats + 1), done=progress)
        first = next(iter(rounds.values()))
        rows += [{"sequences": number, "asks for": name, **costs_of(found, first)} for name, found in rounds.items()]
    return Report({"levels_of_a_step": LEVELS, "leaves": EngineConfig.leaves, "costs": rows})


def _play(sequences: int, asked: Sequence[str], _: object) -> "Costs":
    exchange = DraftExchange(sequences, asked)
    for _ in range(WARM_STEPS):
        exchange.step()
    exchange.costs = Costs()
    for _ in range(STEPS):
        exchange.step()
    return exchange.costs


@dataclass
class Costs:
    """Of all steps of a round."""

    levels: int = 0
    draft: float = 0.0  # seconds: a level without its forward
    attaching: float = 0.0  # seconds: the target's, of what a level sent
    stepping: float = 0.0  # seconds: the target's, to propose, to re-root, and to tell
    from_draft: int = 0  # bytes
    from_target: int = 0  # bytes

    @property
    def seconds(self) -> float:
        return self.draft + self.attaching + self.stepping


def costs_of(rounds: Sequence[Costs], first: Sequence[Costs]) -> Row:
    """`over_first`: CPU time of both sides in all, over that of another kind in the same round."""
    return {
        "draft_us_a_level": Spread.of([1e6 * one.draft / one.levels for one in rounds]),
        "target_us_a_level": Spread.of([1e6 * one.attaching / one.levels for one in rounds]),
        "target_us_a_step": Spread.of([1e6 * one.stepping / STEPS for one in rounds]),
        "bytes_a_level": Spread.of([one.from_draft / one.levels for one in rounds]).median,
        "bytes_a_step": Spread.of([one.from_target / STEPS for one in rounds]).median,
        "over_first": ratios([one.seconds for one in rounds], [one.seconds for one in first]),
    }


@dataclass
class ScriptedExecutor:
    """Gives each leaf the same children with the same chances, but for their tokens; says how long that took."""

    children: int
    num_slots: int = SLOTS
    context: int = 1 << 14
    vocab_size: int = VOCAB
    deepest: int = ANY_DEPTH
    seconds: float = 0.0

    def padded(self, rows: int) -> int:
        return rows

    def execute(self, rows: Sequence[SequenceRows], sampling: Sampling) -> Outcome:  # noqa: ARG002
        began = time.perf_counter()
        leaves, places = len(sampling), np.arange(self.children)
        tokens = (31 * sampling.positions[:, None] + 7 * np.arange(leaves)[:, None] + places) % VOCAB
        chances = np.log(0.5) * (1.0 + places)
        outcome = Outcome(tokens, np.broadcast_to(chances, (leaves, self.children)))
        self.seconds += time.perf_counter() - began
        return outcome


@dataclass
class Hand:
    """A draft's channel: what it is sent, and what it has sent."""

    inbox: list[Received] = field(default_factory=list)
    outbox: list[bytes] = field(default_factory=list)

    def send(self, peer: Peer, *frames: bytes) -> bool:  # noqa: ARG002
        self.outbox.extend(frames)
        return True

    def receive(self, timeout: float) -> list[Received]:  # noqa: ARG002
        frames, self.inbox = self.inbox, []
        return frames


class DraftExchange:
    """A target and a draft, step by step: the draft grows some levels, then the target commits two of its guesses and a
    token that nobody guessed, or that somebody did."""

    def __init__(self, sequences: int, asked: Sequence[str]) -> None:
        self.costs = Costs()
        children = DraftConfig.children
        self._hand, self._executor = Hand(), ScriptedExecutor(children)
        pool, shape = SlotPool(SLOTS), LevelShape(EngineConfig.leaves, children)
        table = SessionTable(pool)
        machine = DraftMachine(DraftIdentity("draft", "digest", {}), table, shape, self._executor.context)
        machine.capabilities[:] = asked
        self._worker = DraftWorker(machine, Grower(self._executor, table, children), self._hand)  # type: ignore[arg-type]
        hello = Hello(PROTOCOL_VERSION, "digest", VOCAB, "target", capabilities=list(TARGET_CAPABILITIES))
        self._drafter = RemoteDrafter(hello, [DraftPool("pool", POOL)], self._post, RemoteOptions(), lambda _: None)
        self.machine = self._drafter.machine
        self._requests = [_request(number) for number in range(sequences)]
        self._drafter.tick()
        self._levels(1)

    def step(self) -> None:
        began = time.perf_counter()
        self._commit(self._drafter.propose(self._requests, LIMITS))
        self.costs.stepping += time.perf_counter() - began
        self._levels(LEVELS)

    def _commit(self, trees: list[Guesses]) -> None:
        self._drafter.verified(self._requests, Forest.of(trees))
        for request, tree in zip(self._requests, trees, strict=True):
            tokens = _accepted(tree)
            request.extend(tokens)
            self._drafter.commit(request, tokens)
        self._drafter.flush()

    def _levels(self, count: int) -> None:
        for _ in range(count):
            before, began = self._executor.seconds, time.perf_counter()
            self.costs.levels += self._worker.turn(0.0)
            ended = time.perf_counter()
            self.costs.draft += ended - began - (self._executor.seconds - before)
            frames, self._hand.outbox = self._hand.outbox, []
            for frame in frames:
                self._drafter.receive(Received(POOL, frame))
            self.costs.attaching += time.perf_counter() - ended
            self.costs.from_draft += sum(map(len, frames))

    def _post(self, _: Peer, *frames: bytes) -> None:
        self._hand.inbox += [Received(TARGET, frame) for frame in frames]
        self.costs.from_target += sum(map(len, frames))


def _request(number: int) -> Request:
    tokens = [(number + 3 * place) % VOCAB for place in range(PROMPT)]
    params = SamplingParams(max_tokens=8000, temperature=0.8, seed=number)
    return Request(number, tokens, params, number, frozenset(), 10_000)


def _accepted(tree: Guesses) -> list[int]:
    """Two nodes, one below the other, and a third, or what is no node."""
    nodes, tokens, parent = tree.tree(), list[int](), ROOT
    while len(tokens) < 3 and (below := np.flatnonzero(nodes.parents == parent)).size:
        parent = int(below[0])
        tokens.append(int(nodes.tokens[parent]))
    return tokens or [1]
