"""The servers of a target: who is heard, what is lost, whose requests end. No sockets, no threads, a clock by hand."""

from collections import defaultdict
from typing import Any

import pytest
from attending import STEP, status

from pilotfish.core.cache.prefix_cache import PrefixCache, RunWatcher
from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.peers.fields import Peer
from pilotfish.core.routing.held_prefixes import Held, HeldCopies, routing_keys
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.targets import servers as servers_module
from pilotfish.engine.targets.servers import Attendance, Dropped, HeldFollowers, Malformed, Servers
from pilotfish.wire import serving
from pilotfish.wire.channel import Received, decoded, encode

A, B = b"a", b"b"

ASKED = serving.EngineRequest([1, 2], SamplingParams())


class Rig:
    """Both threads of `Servers`, by turns, and what each server was sent."""

    def __init__(self) -> None:
        self.now = 0.0
        self.servers = Servers(self, lambda: self.now)  # type: ignore[arg-type]
        self.servers._thread.post = self._post  # type: ignore[method-assign]
        self.told: dict[Peer, list[serving.ToServer]] = defaultdict(list)
        self.known: dict[Peer, Attendance] = defaultdict(lambda: Attendance(self.servers.incarnation))

    def _post(self, peer: Peer, *frames: bytes) -> None:
        self.told[peer] += [decoded(serving.SERVER_DECODER, frame) for frame in frames]

    def hear(self, peer: Peer, message: serving.ToTarget) -> None:
        self.servers._receive(Received(peer, encode(message)))

    def attend(self, *peers: Peer) -> None:
        for peer in peers:
            self.hear(peer, self.known[peer].attend())

    def submit(self, peer: Peer, number: int, lost: bool = False) -> None:
        self.known[peer].sent += 1
        if not lost:
            self.hear(peer, serving.Submit(number, self.servers.incarnation, ASKED))

    def abort(self, peer: Peer, number: int, lost: bool = False) -> None:
        self.known[peer].sent += 1
        if not lost:
            self.hear(peer, serving.Abort(number, self.servers.incarnation))

    def taken(self) -> list[tuple[Peer, Any]]:
        """What the loop takes in; it drops at once what it is to drop."""
        taken = self.servers.take(0.0)
        for one in taken:
            if isinstance(one.message, Dropped):
                self.servers.drop(one.server, one.message)
        return [(one.server.peer, one.message) for one in taken]

    def progress(self, *peers: Peer) -> None:
        for peer in peers:
            self.servers.progress(self.servers._known[peer], STEP, [])

    def follows(self, peer: Peer) -> bool:
        """Whether the server, which reads all that it was told, finds it whole."""
        told = [
            message
            for message in self.told.pop(peer, [])
            if isinstance(message, serving.Beat | serving.StepProgress | serving.Failure)
        ]
        follows = [self.known[peer].follows(message) for message in told]
        return all(follows)

    def let_pass(self, seconds: float, *attending: Peer) -> None:
        for turn in range(round(seconds / servers_module.TICK)):
            self.now += servers_module.TICK
            self.servers._tick()
            if turn % 5 == 4:
                self.attend(*attending)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def kinds(messages: list[serving.ToServer]) -> list[str]:
    return [type(message).__name__ for message in messages]


def test_a_server_hears_that_the_target_lives_and_then_what_it_serves(rig: Rig) -> None:
    rig.attend(A)
    assert kinds(rig.told[A]) == ["Beat"]  # while it loads
    rig.let_pass(3 * servers_module.BEAT, A)
    assert set(kinds(rig.told.pop(A))) == {"Beat"}
    rig.servers.tell_all(status(rig.servers.incarnation))
    assert kinds(rig.told.pop(A)) == ["Status"]
    rig.attend(B)
    assert kinds(rig.told[B]) == ["Beat", "Status"]
    rig.attend(A, B)
    assert kinds(rig.told[A]) == [] and kinds(rig.told[B]) == ["Beat", "Status"]


def test_beats_tell_how_long_the_step_at_hand_lasts(rig: Rig) -> None:
    rig.attend(A)
    rig.servers.step_seconds = lambda: 7.5
    rig.let_pass(2 * servers_module.BEAT)
    assert [beat.step for beat in rig.told[A] if isinstance(beat, serving.Beat)][-1] == 7.5


def test_nothing_is_lost_between_two_servers_and_a_target(rig: Rig) -> None:
    rig.attend(A, B)
    for number in (1, 2):
        rig.submit(A, number)
        rig.submit(B, number)
        rig.progress(A, B, A)
        rig.abort(A, number)
        rig.let_pass(1.0, A, B)
    assert [(peer, type(m).__name__, m.id) for peer, m in rig.taken()] == [
        *((A, "Submit", 1), (B, "Submit", 1), (A, "Abort", 1)),
        *((A, "Submit", 2), (B, "Submit", 2), (A, "Abort", 2)),
    ]
    rig.servers.fail(rig.servers._known[A], [2], "no", True, None)
    rig.let_pass(1.0, A, B)
    assert rig.follows(A) and rig.follows(B)
    assert (rig.known[A].sequence, rig.known[B].sequence) == (5, 2)


@pytest.mark.parametrize("what", ["submit", "abort"])
def test_a_message_that_was_lost_ends_the_requests_of_its_server_alone(rig: Rig, what: str) -> None:
    rig.attend(A, B)
    rig.submit(A, 1)
    rig.submit(B, 1)
    getattr(rig, what)(A, 1, lost=True)
    rig.submit(A, 3)
    rig.let_pass(servers_module.BEAT, A, B)
    dropped = [peer for peer, message in rig.taken() if isinstance(message, Dropped)]
    assert dropped == [A]
    rig.let_pass(servers_module.BEAT, A, B)
    assert not rig.follows(A) and rig.follows(B)
    rig.submit(A, 4)
    rig.progress(A)
    rig.let_pass(2.0, A, B)
    assert rig.follows(A) and [m.id for _, m in rig.taken()] == [4]


@pytest.mark.parametrize("after", ["progress", "nothing"])
def test_what_a_server_was_told_in_vain_shows_with_the_next_message(rig: Rig, after: str) -> None:
    rig.attend(A)
    rig.submit(A, 1)
    rig.progress(A)
    rig.told[A].pop()
    if after == "progress":
        rig.progress(A)
    else:
        rig.let_pass(servers_module.BEAT, A)
    assert not rig.follows(A)
    rig.progress(A)
    rig.let_pass(servers_module.BEAT, A)
    assert rig.follows(A)


def test_a_silent_server_that_asks_for_something_and_ends_loses_that_too(rig: Rig) -> None:
    rig.attend(A)
    rig.let_pass(serving.SERVER_SILENCE + 1)
    rig.submit(A, 1)
    rig.let_pass(serving.SERVER_SILENCE + 1)
    assert [type(message) for _, message in rig.taken()] == [Dropped, serving.Submit, Dropped]


def test_what_is_meant_for_another_target_is_dropped(rig: Rig) -> None:
    rig.hear(A, serving.Attend(serving.SERVING_VERSION, "another", 7, 9))
    rig.hear(A, serving.Submit(1, "another", ASKED))
    rig.hear(A, serving.Abort(1, "another"))
    rig.hear(B, serving.Submit(1, rig.servers.incarnation, ASKED))  # which nobody attends to
    assert rig.taken() == []
    rig.submit(A, 1)
    rig.attend(A)
    assert [message.id for _, message in rig.taken()] == [1] and rig.follows(A)


def test_a_request_that_is_none_is_refused_alone(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    rig.attend(A)
    bad = {"type": "submit", "id": 4, "incarnation": rig.servers.incarnation, "request": {"tokens": ["x"]}}
    rig.known[A].sent += 1
    for frame in (b"\xff\x00", encode(bad), b""):
        rig.servers._receive(Received(A, frame))
        rig.servers._receive(Received(B, frame))  # of nobody
    rig.attend(A)
    ((peer, message),) = rig.taken()
    assert peer == A and isinstance(message, Malformed) and message.id == 4 and "tokens" in message.reason
    assert len(caplog.records) == 1


def test_another_version_is_declined(rig: Rig) -> None:
    rig.hear(A, serving.Attend(serving.SERVING_VERSION + 1, "", 0, 0))
    (declined,) = rig.told[A]
    assert isinstance(declined, serving.Declined) and f"of version {serving.SERVING_VERSION + 1}," in declined.reason
    rig.let_pass(servers_module.BEAT)
    assert len(rig.told[A]) == 1


def test_a_target_that_leaves_serves_nobody_any_more(rig: Rig) -> None:
    rig.attend(A)
    rig.told.clear()
    rig.servers.leave()
    rig.let_pass(2 * servers_module.BEAT, A, B)
    assert {
        message.reason for peer in (A, B) for message in rig.told[peer] if isinstance(message, serving.Declined)
    } == {"it shuts down"}
    assert set(kinds(rig.told[A] + rig.told[B])) == {"Declined"}


def test_too_many_servers_are_declined_and_silent_ones_forgotten(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers_module, "MAX_SERVERS", 2)
    rig.attend(A, B)
    rig.submit(A, 1)
    rig.progress(A)
    rig.attend(b"c")
    (declined,) = rig.told.pop(b"c")
    assert isinstance(declined, serving.Declined) and declined.reason == "2 servers attend already"
    rig.let_pass(serving.SERVER_SILENCE + 1, B)
    rig.taken()
    rig.attend(b"c")
    assert kinds(rig.told[b"c"]) == ["Beat"]
    rig.let_pass(serving.SERVER_SILENCE + 1, A)  # b and c are silent
    assert len(rig.told[A]) and rig.known[A].sent == 1
    rig.taken()
    rig.let_pass(servers_module.BEAT, A)
    assert not rig.follows(A)  # it was forgotten, and what it waits for with it


# -- who is told what a target holds: servers that ask, all at first and after each loss, then changes

TEXT = list(range(300))


class Holder(Rig):
    """With a cache, and what servers know of it."""

    def __init__(self, cached: bool = True) -> None:
        super().__init__()
        self.pool = SlotPool(1000)
        self.cache = PrefixCache(self.pool, keeps=cached)
        self.followers = HeldFollowers(self.cache, self.servers, lambda: self.now)
        self.copies: dict[Peer, HeldCopies] = defaultdict(HeldCopies)
        self.lost = False

    def _post(self, peer: Peer, *frames: bytes) -> None:
        if not self.lost:
            before = len(self.held(peer))
            super()._post(peer, *frames)
            for held in self.held(peer)[before:]:
                self.copies[peer].apply("target", held)

    def held(self, peer: Peer) -> list[Held]:
        return [message for message in self.told[peer] if isinstance(message, Held)]

    def follow(self, peer: Peer) -> None:
        """A server asks what is held, and may be told."""
        self.hear(peer, Attendance().attend(True, self.copies[peer].expected("target")))
        self.tell()

    def compute(self, tokens: list[int]) -> None:
        slots = self.cache.allocate(len(tokens))
        self.pool.release(self.cache.insert(None, tokens, slots))

    def tell(self, after: float = 1.01 * servers_module.CHANGES) -> None:
        self.now += after
        self.followers.tell(idle=False)

    def pages(self, peer: Peer) -> int:
        """Of the text that a server knows to be held."""
        return self.copies[peer].matched(routing_keys(None, TEXT)).get("target", 0)


@pytest.fixture
def holder() -> Holder:
    return Holder()


def test_a_server_is_told_all_and_then_what_changes(holder: Holder) -> None:
    holder.compute(TEXT[:128])
    holder.follow(A)
    assert holder.pages(A) == 2
    holder.compute(TEXT)
    holder.follow(B)
    assert (holder.pages(A), holder.pages(B)) == (4, 4)
    holder.cache.evict(150)
    holder.tell()
    assert (holder.pages(A), holder.pages(B)) == (2, 2)
    assert [[held.whole for held in holder.held(peer)] for peer in (A, B)] == [[True, False, False], [True, False]]


def test_nothing_is_named_while_nobody_asks(holder: Holder) -> None:
    holder.attend(A)
    holder.compute(TEXT)
    holder.tell()
    assert type(holder.cache.watcher) is RunWatcher and not holder.held(A)


def test_a_gap_is_mended(holder: Holder) -> None:
    holder.follow(A)
    holder.lost = True
    holder.compute(TEXT[:64])
    holder.tell()
    holder.lost = False
    holder.compute(TEXT)
    holder.tell()
    assert holder.pages(A) == 0
    holder.follow(A)  # asks for all
    assert holder.pages(A) == 0  # it was told all a moment ago
    holder.tell(servers_module.AGAIN)
    assert holder.pages(A) == 4


def test_a_server_that_comes_back_is_told_all(holder: Holder) -> None:
    holder.follow(A)
    holder.let_pass(serving.SERVER_SILENCE + 1.5)
    holder.compute(TEXT)
    holder.tell()
    assert holder.pages(A) == 0
    holder.follow(A)
    assert holder.pages(A) == 4


def test_without_a_cache_servers_are_told_that_nothing_is_held() -> None:
    holder = Holder(cached=False)
    holder.follow(A)
    assert holder.held(A) == [Held(0, whole=True)] and holder.copies[A].expected("target") == 1
