from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.drafting.connected_targets import DraftIdentity
from pilotfish.core.drafting.draft_machine import DraftMachine
from pilotfish.core.drafting.draft_sessions import LevelPart, SessionTable
from pilotfish.core.drafting.drafter import CombinedDrafter, Drafter, DraftLimits, NoDrafter
from pilotfish.core.drafting.level_choice import LevelShape
from pilotfish.core.drafting.messages import PROTOCOL_VERSION, Hello, ToDraft, ToTarget
from pilotfish.core.drafting.pools import DraftPool
from pilotfish.core.drafting.target_machine import RemoteOptions, TargetMachine
from pilotfish.core.peers.fields import Peer
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.lookahead import NewNodes
from pilotfish.core.trees.tree import Forest, Guesses
from pilotfish.plan.events import Events, VirtualClock
from pilotfish.plan.simulation.models import Cost, Replay, ReplayedModel
from pilotfish.plan.simulation.setup import Setup
from pilotfish.workers.draft import Grower
from pilotfish.workers.lm import LMDrafter
from pilotfish.workers.ngram import NgramDrafter

#: Vocabulary digest of both sides; a replayed pair has one vocabulary.
TOKENIZER = "simulated"


def with_ngrams(drafter: Drafter, setup: Setup) -> Drafter:
    return CombinedDrafter([drafter, NgramDrafter()]) if setup.speculation.ngrams else drafter


def local_drafter(replay: Replay, setup: Setup, clock: VirtualClock) -> Drafter:
    if setup.speculation.mode == "off" or setup.draft is None:
        return NoDrafter()
    return with_ngrams(DistantDrafter(replay, setup, setup.draft, clock), setup)


class DistantDrafter(LMDrafter):
    def __init__(self, replay: Replay, setup: Setup, draft: Cost, clock: VirtualClock) -> None:
        cost = setup.host.of_local_draft(draft)
        super().__init__(ReplayedModel(replay, cost, clock), setup.speculation.width, clock=clock, prefix_cache=False)
        self._line, self._exchange = clock, 2 * setup.delay

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[Guesses]:
        trees = super().propose(requests, limits)
        if self.levels:
            self._line.now += self._exchange
        return trees


class VirtualPool:
    def __init__(self, events: Events, replay: Replay, setup: Setup, reply: Callable[[Peer, ToTarget], None]) -> None:
        assert setup.draft is not None  # as in every setup with pools
        self._events, self._reply = events, reply
        self._clock = VirtualClock()
        executor = ReplayedModel(replay, setup.host.of_draft(setup.draft), self._clock)
        table, shape = SessionTable(SlotPool(executor.num_slots)), LevelShape(setup.speculation.leaves)
        self.machine = DraftMachine(DraftIdentity("draft", TOKENIZER, {}), table, shape, executor.context)
        self._grower = Grower(executor, table, shape.children)
        self._inbox: deque[tuple[Peer, ToDraft]] = deque()
        self._growing = False
        self.busy = 0.0  # seconds

    def deliver(self, peer: Peer, message: ToDraft) -> None:
        """Messages that come while a level grows are read after it."""
        self._inbox.append((peer, message))
        self.tick()

    def tick(self) -> None:
        if not self._growing:
            self._turn()

    def _turn(self) -> None:
        now = self._clock.now = self._events.now
        while self._inbox:
            self.machine.receive(*self._inbox.popleft(), now)
        self.machine.tick(now)
        self._send()
        level = self.machine.next_level(now)
        self._growing = bool(level)
        if level:
            added = self._grower.grow(level)  # which moves the clock to its end
            self._events.at(self._clock.now, partial(self._grown, level, added, now))

    def _grown(self, level: Sequence[LevelPart], added: Sequence[NewNodes], began: float) -> None:
        self.machine.level_done(level, added, began, self._events.now)
        self.busy += self._events.now - began
        self._send()
        self._turn()

    def _send(self) -> None:
        for outgoing in self.machine.outbox:
            self._reply(outgoing.peer, cast(ToTarget, outgoing.message))
        self.machine.outbox.clear()
        self.machine.notices.clear()


class PooledDrafter(Drafter):
    """Virtual counterpart of `engine.remote_drafts.RemoteDrafter`."""

    def __init__(
        self,
        setup: Setup,
        number: int,
        vocab_size: int,
        clock: Callable[[], float],
        post: Callable[[Peer, ToDraft], None],
    ) -> None:
        pools = [DraftPool(f"pool {number}", pool_peer(number)) for number in range(setup.pools)]
        hello = Hello(PROTOCOL_VERSION, TOKENIZER, vocab_size, "target")
        self.machine = TargetMachine(hello, pools, RemoteOptions(setup.speculation.wanted, first_pool=number))
        self._clock, self._post = clock, post

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[Guesses]:
        return self.machine.propose(requests, limits.nodes, self._clock())

    def expect(self, requests: Sequence[Request]) -> None:
        self.machine.expect(requests, self._clock())
        self.flush()

    def verified(self, requests: Sequence[Request], trees: Forest) -> None:
        self.machine.verified(requests, trees)

    def commit(self, request: Request, tokens: Sequence[int]) -> bool:
        return self.machine.commit(request, tokens, self._clock())

    def flush(self) -> None:
        for outgoing in self.machine.outbox:
            self._post(outgoing.peer, cast(ToDraft, outgoing.message))
        self.machine.outbox.clear()

    def pause(self, request: Request) -> None:
        self.machine.pause(request)
        self.flush()

    def close(self, request: Request) -> None:
        self.machine.close(request)
        self.flush()

    @property
    def ready(self) -> bool:
        return all(pool.ready for pool in self.machine.pools)

    def tick(self, now: float) -> None:
        self.machine.tick(now)
        self.flush()
        for pool in self.machine.pools:
            pool.notices.clear()

    def receive(self, peer: Peer, message: ToTarget, now: float) -> None:
        pool = self.machine.pool_at(peer)
        assert pool is not None  # there are no others
        self.machine.receive(pool, message, now)


def pool_peer(number: int) -> Peer:
    return b"pool %d" % number
