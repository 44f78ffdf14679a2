"""Who is told what a target holds: servers that ask, all at first and after each loss, then changes."""

from __future__ import annotations

from collections import defaultdict

import pytest

from pilotfish.core.cache.prefix_cache import PrefixCache, RunWatcher
from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.peers.fields import Peer
from pilotfish.core.routing.held_prefixes import Held, HeldCopies, routing_keys
from pilotfish.engine.targets.held_followers import AGAIN, CHANGES, HeldFollowers
from pilotfish.engine.targets.servers import Attendance, Servers
from pilotfish.wire.channel import Received, decoded, encode
from pilotfish.wire.serving import SERVER_DECODER, SERVER_SILENCE

A, B = b"a", b"b"
TEXT = list(range(300))


class Rig:
    """A cache, its target's servers, and what they know."""

    def __init__(self, cached: bool = True) -> None:
        self.now = 0.0
        self.servers = Servers(self, lambda: self.now)  # type: ignore[arg-type]
        self.servers._thread.post = self._post  # type: ignore[method-assign]
        self.pool = SlotPool(1000)
        self.cache = PrefixCache(self.pool)
        self.followers = HeldFollowers(self.cache if cached else None, self.servers, lambda: self.now)
        self.known: dict[Peer, HeldCopies] = defaultdict(HeldCopies)
        self.told: dict[Peer, list[Held]] = defaultdict(list)
        self.lost = False

    def _post(self, peer: Peer, frame: bytes) -> None:
        message = decoded(SERVER_DECODER, frame)
        if isinstance(message, Held) and not self.lost:
            self.told[peer].append(message)
            self.known[peer].apply("target", message)

    def attend(self, peer: Peer, held: bool = True) -> None:
        attend = Attendance().attend(held, self.known[peer].expected("target"))
        self.servers._receive(Received(peer, encode(attend)))

    def compute(self, tokens: list[int]) -> None:
        slots = self.cache.allocate(len(tokens))
        self.pool.release(self.cache.insert(None, tokens, slots))

    def tell(self, after: float = 1.01 * CHANGES) -> None:
        self.now += after
        self.followers.tell(idle=False)

    def pages(self, peer: Peer) -> int:
        """Of the text that a server knows to be held."""
        return self.known[peer].matched(routing_keys(None, TEXT)).get("target", 0)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_server_is_told_all_and_then_what_changes(rig: Rig) -> None:
    rig.compute(TEXT[:128])
    rig.attend(A)
    rig.tell()
    assert rig.pages(A) == 2
    rig.compute(TEXT)
    rig.attend(B)
    rig.tell()
    assert (rig.pages(A), rig.pages(B)) == (4, 4)
    rig.cache.evict(150)
    rig.tell()
    assert (rig.pages(A), rig.pages(B)) == (2, 2)
    assert [[held.whole for held in rig.told[peer]] for peer in (A, B)] == [[True, False, False], [True, False]]


def test_nothing_is_named_while_nobody_asks(rig: Rig) -> None:
    rig.attend(A, held=False)
    rig.compute(TEXT)
    rig.tell()
    assert type(rig.cache.watcher) is RunWatcher and not rig.told[A]


def test_changes_are_told_at_once_only_where_nothing_will_change(rig: Rig) -> None:
    rig.attend(A)
    rig.tell()
    rig.compute(TEXT)
    rig.tell(CHANGES / 2)
    assert rig.pages(A) == 0
    rig.followers.tell(idle=True)
    assert rig.pages(A) == 4


def test_a_gap_is_mended(rig: Rig) -> None:
    rig.attend(A)
    rig.tell()
    rig.lost = True
    rig.compute(TEXT[:64])
    rig.tell()
    rig.lost = False
    rig.compute(TEXT)
    rig.tell()
    assert rig.pages(A) == 0
    rig.attend(A)  # asks for all
    rig.tell()
    assert rig.pages(A) == 0  # it was told all a moment ago
    rig.tell(AGAIN)
    assert rig.pages(A) == 4


def test_a_server_that_comes_back_is_told_all(rig: Rig) -> None:
    """Whatever it says that it has heard."""
    rig.attend(A)
    rig.tell()
    for _ in range(int(SERVER_SILENCE / 0.5) + 3):
        rig.now += 0.5
        rig.servers._tick()
    rig.compute(TEXT)
    rig.tell()
    assert rig.pages(A) == 0
    rig.attend(A)
    rig.tell()
    assert rig.pages(A) == 4


def test_without_a_cache_servers_are_told_that_nothing_is_held() -> None:
    rig = Rig(cached=False)
    rig.attend(A)
    rig.tell()
    assert rig.told[A] == [Held(0, whole=True)] and rig.known[A].expected("target") == 1
