"""A check, its context and its result."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from random import Random
from secrets import token_bytes
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from pilotfish.core.drafting.messages import Hello
from pilotfish.wire.conformance.player import Player, PlayerChannel
from pilotfish.wire.conformance.referee import PlayedSession, Referee

Status = Literal["pass", "fail", "skipped"]
Group = Literal["greeting", "sessions", "capabilities", "faults", "load", "rules"]


class CheckResult(Struct, frozen=True):
    name: str
    group: Group
    status: Status
    evidence: str  # in one line


class Figure(Struct, frozen=True):
    name: str
    value: float
    unit: str


class CheckError(Exception):
    """The draft fails a check; why, in one line."""


class NotApplicableError(Exception):
    """The check does not apply to this draft; why, in one line."""


@dataclass(frozen=True)
class KitOptions:
    patience: float = 5.0  # seconds that a draft may take for anything
    context: int = 1024  # tokens of the longest prompt that is tried
    sessions: int = 256  # at once, at most
    garbage: int = 20_000  # mutated frames
    seed: int = 0


@dataclass
class CheckContext:
    dial: Callable[[bytes], PlayerChannel]  # a target of this incarnation: a channel to the pool
    hello: Hello
    options: KitOptions
    referee: Referee
    open_channels: ExitStack
    figures: list[Figure] = field(default_factory=list)

    def stranger(self, incarnation: bytes | None = None, **fields: Any) -> Player:
        """A target that has not greeted yet; `fields` of its Hello."""
        channel = self.dial(incarnation or token_bytes(8))
        self.open_channels.callback(channel.close)
        return Player(channel, replace(self.hello, **fields), self.referee, self.options.patience)

    def target(self, **fields: Any) -> Player:
        player = self.stranger(**fields)
        if not player.greet():
            refused = f"it refused: {player.refusals[0]}" if player.refusals else "nothing answered"
            raise CheckError(f"Hello was not answered with Load within {self.options.patience:g} s; {refused}")
        return player

    def target_of(self, capability: str) -> Player:
        """NotApplicableError where the draft does not name the capability."""
        player = self.target()
        if capability not in player.loads[-1].capabilities:
            raise NotApplicableError(f"it does not say {capability}")
        return player

    @property
    def _first(self) -> int:
        """The first tokens are often special."""
        return min(1000, self.hello.vocab_size // 4)

    def loop(self, length: int, shift: int = 0) -> list[int]:
        """Each of ten tokens always has the same one after it."""
        return [self._first + (shift + place) % 10 for place in range(length)]

    def noise(self, length: int, seed: int) -> list[int]:
        draw, last = Random(seed), max(min(self._first + 500, self.hello.vocab_size) - 1, self._first)
        return [draw.randint(self._first, last) for _ in range(length)]

    def figure(self, name: str, value: float, unit: str) -> None:
        self.figures.append(Figure(name, value, unit))

    def guessed(self, player: Player, session: PlayedSession, seconds: float | None = None) -> bool:
        patience = self.options.patience if seconds is None else seconds
        length = len(session.tokens)
        return player.listen(patience, lambda: any(tree.base_len == length for tree in session.trees))

    def expect_tree(self, player: Player, session: PlayedSession, failure: str) -> None:
        """CheckError, with `failure`, where none comes that knows all tokens."""
        expect(self.guessed(player, session), failure)

    def served(self, player: Player, shift: int = 0) -> PlayedSession:
        """A session over a loop for which a Tree came; drafts that learn from texts get one commit more."""
        session = player.open(self.loop(60, shift))
        if not self.guessed_in_turns(player, [session], 3, shift):
            raise CheckError(f"no Tree came for a text that repeats itself, within {self.options.patience:g} s")
        return session

    def guessed_in_turns(self, player: Player, sessions: Sequence[PlayedSession], turns: int, shift: int = 0) -> bool:
        """Whether all sessions get Trees that know all tokens; after each turn in vain they get a commit more."""
        for _ in range(turns):
            if all(self.guessed(player, session, self.options.patience / turns) for session in sessions):
                return True
            for session in sessions:
                player.commit(session, self.loop(10, shift))
        return False


def expect(held: object, otherwise: str) -> None:
    """CheckError with `otherwise` unless it is true."""
    if not held:
        raise CheckError(otherwise)


def expect_kept(session: PlayedSession, whose: str = "it gave the session back") -> None:
    """CheckError where the draft has answered Resync or Refuse."""
    if reasons := session.resyncs + session.refusals:
        raise CheckError(f"{whose}: {reasons[0]}")


@dataclass(frozen=True)
class Check:
    name: str
    group: Group
    sentence: str  # of docs/draft-protocol.md
    run: Callable[[CheckContext], str]  # the evidence; CheckError, or NotApplicableError

    def found(self, bench: CheckContext) -> CheckResult:
        try:
            return CheckResult(self.name, self.group, "pass", self.run(bench))
        except NotApplicableError as skipped:
            return CheckResult(self.name, self.group, "skipped", str(skipped))
        except CheckError as broken:
            return CheckResult(self.name, self.group, "fail", str(broken))


def check(group: Group, name: str, sentence: str) -> Callable[[Callable[[CheckContext], str]], Check]:
    return lambda run: Check(name, group, sentence, run)
