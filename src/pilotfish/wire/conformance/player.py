"""A target that the kit plays: it sends as a test says, and holds every message that comes against the rules."""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from pilotfish.core.drafting import messages
from pilotfish.core.peers.fields import Error, Peer
from pilotfish.core.peers.peer import EchoClock
from pilotfish.errors import UnknownTypeError, WireError
from pilotfish.wire.channel import Received, decode_to_target, encode, type_of
from pilotfish.wire.conformance.referee import PlayedSession, Referee

#: Seconds between two Hellos, before the first answer and after; without a word after which a draft is silent.
FIRST_GREETING, GREETING, SILENCE = 0.05, 1.0, 1.0
#: Seconds in which frames sent before a Close may still come.
GRACE = 1.0
POOL = b"0"


class PlayerChannel(Protocol):
    def send(self, peer: Peer, *frames: bytes) -> bool: ...

    def receive(self, timeout: float) -> list[Received]: ...

    def close(self) -> None: ...


class Player:
    def __init__(self, channel: PlayerChannel, hello: messages.Hello, referee: Referee, patience: float) -> None:
        self.channel, self.hello, self.referee, self.patience = channel, hello, referee, patience
        self.loads: list[messages.Load] = []  # that came, and when
        self.load_times: list[float] = []
        self.refusals: list[str] = []  # of this target
        self.errors: list[Error] = []
        self.sessions: dict[int, PlayedSession] = {}
        self.greets = True
        self.watches_silence = True
        self.echo = EchoClock()
        self._echoes: dict[int, float] = {}  # when each was sent
        self.next_number = 1
        self._greeted = -GREETING
        self._word = self._busy_until = 0.0  # when a word came last; until when none is to be expected

    def say(self, *said: Struct) -> None:
        self.send(*map(encode, said))

    def send(self, *frames: bytes) -> None:
        deadline = time.monotonic() + self.patience
        while not self.channel.send(POOL, *frames) and time.monotonic() < deadline:
            self.listen(0.01)

    def greet(self) -> bool:
        self.listen(self.patience, lambda: bool(self.loads or self.refusals))
        return bool(self.loads)

    def open(self, tokens: Sequence[int], wanted: int = 64, **fields: Any) -> PlayedSession:
        now = time.monotonic()
        session = PlayedSession(self.next_number, 1, list(tokens), wanted, now, len(tokens))
        self.next_number += 1
        self.sessions[session.number] = session
        self._open(session, **fields)
        return session

    def reopen(self, session: PlayedSession) -> None:
        session.reopen(time.monotonic())
        self._open(session)

    def _open(self, session: PlayedSession, **fields: Any) -> None:
        length = len(session.tokens)
        head = session.number, session.generation, session.tokens, length, length + 10_000
        own: dict[str, Any] = {"seed": 7, "sampling": messages.RequestSampling(temperature=0.0), **fields}
        self.say(messages.Open(*head, wanted=session.wanted, **own))

    def commit(self, session: PlayedSession, tokens: Sequence[int], wanted: int | None = None) -> messages.Commit:
        session.wanted = session.wanted if wanted is None else wanted
        base_len = len(session.tokens)
        session.tokens.extend(tokens)
        session.told = len(session.tokens)
        message = messages.Commit(session.number, session.generation, base_len, list(tokens), session.wanted)
        self.say(message)
        return message

    def close(self, session: PlayedSession) -> None:
        session.closed_at = time.monotonic()
        self.say(messages.Close(session.number, session.generation))

    def listen(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Whether `until` held in time."""
        deadline = time.monotonic() + seconds
        while not until():
            now = time.monotonic()
            if now >= deadline:
                return False
            if self.greets and now - self._greeted >= (GREETING if self._word else FIRST_GREETING):
                self._greet(now)
            for received in self.channel.receive(min(deadline - now, 0.02)):
                self._take(bytes(received.frame), time.monotonic())
            self._look(time.monotonic())
        return True

    def _greet(self, now: float) -> None:
        self._greeted = now
        echo = self.echo.stamp(now)
        self._echoes[echo.sent] = now
        self.channel.send(POOL, encode(msgspec.structs.replace(self.hello, echo=echo)))

    def _look(self, now: float) -> None:
        quiet = now - max(self._word, self._busy_until)
        if self._word and self.watches_silence and quiet > SILENCE:
            self.referee.breach("silence", f"nothing was heard for {quiet:.1f} s")
            self._word = 0.0  # until the next word

    def _take(self, frame: bytes, now: float) -> None:
        try:
            message = decode_to_target(frame)
        except UnknownTypeError as error:
            self.referee.breach("unknown-type", f"a message of type {error.kind}")
            return
        except WireError as error:
            self.referee.breach("malformed", f"a frame of type {type_of(frame) or 'none'}: {error}")
            return
        self._word = now
        self._hear(message, now)

    def _hear(self, message: messages.ToTarget, now: float) -> None:
        if isinstance(message, messages.Load):
            self._hear_load(message, now)
        elif isinstance(message, messages.Refuse) and message.session == messages.CONNECTION:
            self.refusals.append(message.reason)
        elif isinstance(message, Error):
            self._needs(messages.ERRORS, "error")
            self.errors.append(message)
        else:
            self._hear_of_session(message, now)

    def _needs(self, capability: str, kind: str) -> None:
        if capability not in self.hello.capabilities:
            self.referee.breach("capability", f"{kind} came to a target that does not say {capability}")

    def _hear_load(self, load: messages.Load, now: float) -> None:
        self.loads.append(load)
        self.load_times.append(now)
        self._busy_until = now + load.busy_ms / 1000
        if load.echo is not None:
            sent = None if load.echo.heard is None else self._echoes.get(load.echo.heard)
            if load.echo.heard is not None and (sent is None or load.echo.held / 1e6 > now - sent + 0.01):
                self.referee.breach("echo", f"heard {load.echo.heard}, held {load.echo.held}")
            self.echo.hear(load.echo, now)

    def _hear_of_session(self, message: Any, now: float) -> None:
        """Of any type that names a session."""
        kind = type(message).__name__
        session = self.sessions.get(message.session)
        if session is None or message.generation > session.generation:
            rule = "tree-session" if isinstance(message, messages.Tree) else "resync-session"
            detail = f"{kind} of session {message.session}, generation {message.generation}"
            self.referee.breach("tree-generation" if session and isinstance(message, messages.Tree) else rule, detail)
        elif isinstance(message, messages.Resync):
            session.resyncs.append(message.reason)
        elif isinstance(message, messages.Refuse):
            session.refusals.append(message.reason)
        elif isinstance(message, messages.Progress):
            self._needs(messages.PROGRESS, "progress")
            if message.read > len(session.tokens):
                self.referee.breach("progress", f"{message.read} of {len(session.tokens)} tokens are read")
        elif isinstance(message, messages.Pause | messages.Resume):
            self._needs(messages.PAUSES, kind.lower())
        elif isinstance(message, messages.Tree):
            self._hear_tree(session, message, now)

    def _hear_tree(self, session: PlayedSession, tree: messages.Tree, now: float) -> None:
        if session.closed_at is not None and now - session.closed_at > GRACE:
            self.referee.breach("after-close", f"session {tree.session}: a Tree, {now - session.closed_at:.1f} s later")
        elif tree.generation < session.generation:
            if now - session.opened_at > GRACE:
                older = f"generation {tree.generation}, long after {session.generation} began"
                self.referee.breach("tree-generation", f"session {tree.session}: {older}")
        elif session.closed_at is None:
            self.referee.tree(session, tree)
            session.trees.append(tree)
            session.arrivals.append(now)
