"""The servers that attend to a target. Imports no torch: servers hear that the target lives before it imports that.

step loop          take: what was asked for      progress, fail: numbered      tell_all: Status
─────────────────────────────── a queue each way, nobody waits ────────────────────────────────
channel's thread   Attend: known, heard          the rest: to the loop         Beat, twice a second
"""

import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

import msgspec

from pilotfish.core.cache.prefix_cache import PrefixCache
from pilotfish.core.peers.fields import Id, Peer, Text
from pilotfish.core.routing.held_prefixes import Held, HeldPrefixes, HeldRuns
from pilotfish.errors import WireError
from pilotfish.kv.lanes import drained
from pilotfish.wire import serving
from pilotfish.wire.channel import Channel, ChannelThread, Received, decoded, encode

logger = logging.getLogger(__name__)

#: Seconds between two Beats, and between two looks at who is silent.
BEAT, TICK = 0.5, 0.1
#: Servers that a target knows. Beyond them those that are silent are forgotten, and others declined.
MAX_SERVERS = 256
#: Longest time between two looks that counts as silence. A later look means that this process, or the whole machine,
#: stood still itself.
LONGEST_LOOK = 0.5
LEAVING = "it shuts down"


@dataclass
class Silence:
    """Seconds since a process was last heard, without the time in which this process stood still."""

    seconds: float = 0.0
    _looked: float | None = None  # when the last look was

    def heard(self) -> None:
        self.seconds = 0.0

    def look(self, now: float) -> float:
        if self._looked is not None:
            self.seconds += min(now - self._looked, LONGEST_LOOK)
        self._looked = now
        return self.seconds


@dataclass
class Attendance:
    """Counts a server's messages with one target, so that no loss goes unnoticed (`wire/serving.py`). For one
    thread."""

    incarnation: str = ""  # of the target; "" while none is known
    sent: int = 0  # Submits, Aborts and Revises to it
    sequence: int = 0  # of the StepProgress or Failure that comes next

    def attend(self, held: bool = False, heard: int = 0) -> serving.Attend:
        return serving.Attend(serving.SERVING_VERSION, self.incarnation, self.sent, self.sequence, held, heard)

    def follows(self, message: serving.StepProgress | serving.Failure | serving.Beat) -> bool:
        """False after lost messages: then all requests at the target are over."""
        told = message.sequence
        if isinstance(message, serving.Beat):
            followed, self.sequence = told <= self.sequence, max(told, self.sequence)
        else:
            followed, self.sequence = told == self.sequence, told + 1
        return followed


@dataclass(eq=False)
class AttendedServer:
    """One thread writes each field."""

    peer: Peer
    present: bool = True  # channel's thread: it is heard
    silence: Silence = field(default_factory=Silence)
    received: int = 0  # channel's thread: Submits, Aborts and Revises
    malformed: int = 0  # channel's thread: frames
    follows: bool = False  # channel's thread: it wants to know which prefixes are held
    heard: int = 0  # channel's thread: the Held that it expects; 0: it asks for all
    sequence: int = 0  # loop: of the next StepProgress or Failure


@dataclass(frozen=True)
class Dropped:
    """All requests of a server end; a gap in the numbers of its messages tells it so."""

    reason: str
    sequence: int = 0  # that it expects


@dataclass(frozen=True)
class Malformed:
    id: int
    reason: str


@dataclass(frozen=True)
class FromServer:
    server: AttendedServer
    message: serving.Submit | serving.Abort | serving.Revise | Malformed | Dropped


class Addressed(msgspec.Struct, frozen=True):
    """The least that a frame must say for its request to be refused."""

    id: Id
    incarnation: Text


_addressed = msgspec.msgpack.Decoder(Addressed)


class Servers:
    def __init__(self, channel: Channel, clock: Callable[[], float] = time.monotonic) -> None:
        self.incarnation = secrets.token_hex(8)  # of this target
        self.step_seconds: Callable[[], float] = lambda: 0.0  # that the step at hand has lasted; any thread may ask
        self._thread = ChannelThread(channel, TICK)
        self._clock = clock
        self._known: dict[Peer, AttendedServer] = {}
        self._asked = SimpleQueue[FromServer | None]()
        self._status: bytes | None = None  # the last one
        self._beaten = -BEAT  # when the last Beats left
        self._leaving = False

    def start(self) -> None:
        self._thread.start(self._receive, self._tick)

    def close(self) -> None:
        self._thread.close()

    # -- the loop

    def take(self, timeout: float) -> list[FromServer]:
        """In order; waits up to `timeout` seconds, or until `wake`."""
        return [asked for asked in drained(self._asked, timeout) if asked is not None]

    def wake(self) -> None:
        """From any thread, or a signal's handler."""
        self._asked.put(None)

    def progress(self, server: AttendedServer, step: serving.StepReport, deltas: Sequence[serving.Delta]) -> None:
        self._tell(server, serving.StepProgress(server.sequence, step, list(deltas)))

    def fail(self, server: AttendedServer, ids: Sequence[int], reason: str, refused: bool, field: str | None) -> None:
        self._tell(server, serving.Failure(server.sequence, list(ids), reason, refused, field))

    def drop(self, server: AttendedServer, dropped: Dropped) -> None:
        """Leaves a gap in the numbers, wider than what may be under way."""
        server.sequence = max(server.sequence, dropped.sequence) + serving.WAITING

    def tell_all(self, status: serving.Status) -> None:
        """Later servers are told so too, at once."""
        frame = self._status = encode(status)
        for server in self._present():
            self._thread.post(server.peer, frame)

    def followers(self) -> list[AttendedServer]:
        return [server for server in self._present() if server.follows]

    def tell_held(self, server: AttendedServer, held: Held) -> None:
        self._thread.post(server.peer, encode(held))

    def leave(self) -> None:
        """Later servers are told so too."""
        self._leaving = True
        for server in self._present():
            self._post(server.peer, serving.Declined(LEAVING))

    def _tell(self, server: AttendedServer, message: serving.StepProgress | serving.Failure) -> None:
        self._thread.post(server.peer, encode(message))
        server.sequence += 1  # now: a Beat must not tell of what is not under way yet

    def _present(self) -> list[AttendedServer]:
        return [server for server in list(self._known.values()) if server.present]

    # -- the channel's thread

    def _tick(self) -> None:
        now = self._clock()
        for server in self._present():
            if server.silence.look(now) > serving.SERVER_SILENCE:
                server.present = False
                self._ask(server, Dropped(f"it was silent for {serving.SERVER_SILENCE:g} s"))
        if now - self._beaten >= BEAT and not self._leaving:
            self._beaten = now
            for server in self._present():
                self._beat(server)

    def _beat(self, server: AttendedServer) -> None:
        self._post(server.peer, serving.Beat(os.getpid(), self.step_seconds(), self.incarnation, server.sequence))

    def _receive(self, received: Received) -> None:
        server = self._known.get(received.peer)
        try:
            message = decoded(serving.TARGET_DECODER, received.frame)
        except WireError as error:
            if server is not None:
                self._refuse(server, received, str(error))
            return
        if isinstance(message, serving.Attend):
            self._attend(received.peer, message)
        elif server is not None and message.incarnation == self.incarnation:
            self._hear(server)
            server.received += 1
            self._ask(server, message)

    def _refuse(self, server: AttendedServer, received: Received, reason: str) -> None:
        """A malformed request is refused if it names itself; the server's first gives a log line."""
        server.malformed += 1
        if server.malformed == 1:
            logger.warning("dropped a frame of server %s: %s", server.peer.hex(), reason)
        with suppress(WireError):
            request = decoded(_addressed, received.frame)
            if request.incarnation == self.incarnation:
                server.received += 1
                self._ask(server, Malformed(request.id, reason))

    def _attend(self, peer: Peer, attend: serving.Attend) -> None:
        if reason := self._unfit(peer, attend):
            self._post(peer, serving.Declined(reason))
            return
        server = self._known.get(peer)
        if server is None:
            server = self._known[peer] = AttendedServer(peer, present=False)
        server.follows, server.heard = attend.held, attend.heard
        self._hear(server)
        if attend.incarnation == self.incarnation and attend.sent != server.received:
            server.received = attend.sent
            self._ask(server, Dropped("messages of it were lost", attend.sequence))

    def _unfit(self, peer: Peer, attend: serving.Attend) -> str:
        if self._leaving:
            return LEAVING
        if attend.version != serving.SERVING_VERSION:
            return f"its messages are of version {attend.version}, those of this target of {serving.SERVING_VERSION}"
        if peer not in self._known and len(self._known) >= MAX_SERVERS:
            self._known = {peer: server for peer, server in self._known.items() if server.present}
        full = peer not in self._known and len(self._known) >= MAX_SERVERS
        return f"{MAX_SERVERS} servers attend already" if full else ""

    def _hear(self, server: AttendedServer) -> None:
        server.silence.heard()
        if server.present:
            return
        server.present = True  # before all else: whoever sets the status afterwards tells it too
        self._beat(server)
        if self._status is not None:
            self._thread.post(server.peer, self._status)

    def _ask(
        self, server: AttendedServer, message: serving.Submit | serving.Abort | serving.Revise | Malformed | Dropped
    ) -> None:
        self._asked.put(FromServer(server, message))

    def _post(self, peer: Peer, message: serving.ToServer) -> None:
        self._thread.post(peer, encode(message))


#: Seconds between two messages with changes; before a server that still asks for all is told all again.
CHANGES, AGAIN = 0.1, 1.0


class HeldFollowers:
    """For the step loop: tells servers that choose among targets which prefixes this one holds, all at first, then
    changes. Names what the cache holds once the first server asks."""

    def __init__(self, cache: PrefixCache, servers: Servers, clock: Callable[[], float]) -> None:
        self._cache, self._servers, self._clock = cache, servers, clock
        self._prefixes: HeldPrefixes | None = None
        self._told: dict[AttendedServer, float] = {}  # when followers were told all
        self._changed = -CHANGES  # when servers were told last

    def tell(self, idle: bool) -> None:
        """If it is due; at once if nothing will change for a while (`idle`)."""
        now = self._clock()
        if not idle and now - self._changed < CHANGES:
            return
        self._changed = now
        followers = self._servers.followers()
        self._told = {server: self._told[server] for server in followers if server in self._told}
        if not followers:
            return
        if self._prefixes is None:
            self._prefixes = HeldRuns(self._cache).prefixes
        prefixes = self._prefixes
        changes = prefixes.changes()
        for server in followers:
            told = self._told.get(server)
            if told is None or (not server.heard and now - told >= AGAIN):  # it asks for all
                self._told[server] = now
                self._servers.tell_held(server, prefixes.whole())
            elif changes is not None:
                self._servers.tell_held(server, changes)
