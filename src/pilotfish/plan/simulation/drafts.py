from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.drafting.connected_targets import DraftIdentity
from pilotfish.core.drafting.draft_machine import DraftMachine
from pilotfish.core.drafting.draft_sessions import LevelPart, SessionTable
from pilotfish.core.drafting.drafter import CombinedDrafter, Drafter, DraftLimits, NoDrafter
from pilotfish.core.drafting.level_choice import LevelShape
from pilotfish.core.drafting.messages import PROTOCOL_VERSION, Hello
from pilotfish.core.drafting.pools import DraftPool
from pilotfish.core.drafting.target_machine import RemoteOptions
from pilotfish.core.peers.fields import Peer
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.lookahead import NewNodes
from pilotfish.core.trees.tree import Guesses
from pilotfish.plan.events import Events, VirtualClock
from pilotfish.plan.simulation.models import Cost, Replay, ReplayedModel
from pilotfish.plan.simulation.setup import Setup
from pilotfish.wire.channel import decode_to_draft, send_all
from pilotfish.wire.pool_users import RemoteDrafter
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
    def __init__(self, events: Events, replay: Replay, setup: Setup, reply: Callable[..., None]) -> None:
        assert setup.draft is not None  # as in every setup with pools
        self._events, self._reply = events, reply
        self._clock = VirtualClock()
        executor = ReplayedModel(replay, setup.host.of_draft(setup.draft), self._clock)
        table, shape = SessionTable(SlotPool(executor.num_slots)), LevelShape(setup.speculation.leaves)
        self.machine = DraftMachine(DraftIdentity("draft", TOKENIZER, {}), table, shape, executor.context)
        self._grower = Grower(executor, table, shape.children)
        self._inbox: deque[tuple[Peer, bytes]] = deque()
        self._growing = False
        self.busy = 0.0  # seconds

    def deliver(self, peer: Peer, frame: bytes) -> None:
        """Frames that come while a level grows are read after it."""
        self._inbox.append((peer, frame))
        self.tick()

    def tick(self) -> None:
        if not self._growing:
            self._turn()

    def _turn(self) -> None:
        now = self._clock.now = self._events.now
        while self._inbox:
            peer, frame = self._inbox.popleft()
            self.machine.receive(peer, decode_to_draft(frame), now)
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
        send_all(self.machine.outbox, self._reply)
        self.machine.notices.clear()


def pooled_drafter(
    setup: Setup, number: int, vocab_size: int, clock: Callable[[], float], post: Callable[..., None]
) -> RemoteDrafter:
    """Of the `number`th target."""
    pools = [DraftPool(f"pool {own}", peer_of(own)) for own in range(setup.pools)]
    options = RemoteOptions(setup.speculation.wanted, first_pool=number)
    return RemoteDrafter(Hello(PROTOCOL_VERSION, TOKENIZER, vocab_size, "target"), pools, post, options, clock=clock)


def peer_of(number: int) -> Peer:
    """Of a pool, or of a target."""
    return b"%d" % number
