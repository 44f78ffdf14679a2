"""A lawful drafter, the example's, and thirty that break one rule each."""

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import ngram_drafter
import zmq
from support import running

from pilotfish.core.drafting.messages import Close, Commit, Hello, Open

Example: Any = ngram_drafter.Drafter


class Lawful(Example):
    """Runs until it is stopped. A tree passes through `altered` on its way."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        super().__init__(socket)
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.is_set():
            if self.socket.poll(20):
                parts = self.socket.recv_multipart()
                if len(parts) > 2:
                    self.receive(*parts)
            if time.monotonic() - self.reported >= 0.25:
                self.report()

    def send(self, route: bytes, kind: str, **fields: Any) -> None:
        if kind == "tree":
            self.altered(fields)
        super().send(route, kind, **fields)

    def altered(self, tree: dict[str, Any]) -> None:
        """Nothing is."""


class DeadParents(Lawful):
    """Hangs everything below the first node that it ever sent."""

    first = 0

    def altered(self, tree: dict[str, Any]) -> None:
        self.first = self.first or tree["ids"][0]
        if tree["sequence"]:
            tree["parents"] = [self.first] * len(tree["ids"])


def altering(name: str, change: Callable[[dict[str, Any], int], dict[str, Any]]) -> type[Lawful]:
    """A drafter whose trees have other fields: `change` is given a tree and the number of its nodes."""
    altered = lambda _, tree: tree.update(change(tree, len(tree["ids"])))  # noqa: E731
    return type(name, (Lawful,), {"altered": altered})


#: Changes of every tree, with the check that shows it, and with what has to fail then.
ALTERED: dict[str, tuple[Callable[[dict[str, Any], int], dict[str, Any]], str, str]] = {
    "FallingIds": (
        lambda tree, n: {"ids": [tree["ids"][-1] + 1 - place for place in range(n)], "parents": [0] * n},
        *("guesses", "tree-ids"),
    ),
    "RestartingIds": (lambda _, n: {"ids": [*range(1, n + 1)], "parents": [0] * n}, "follows-commits", "tree-ids"),
    "BaseLenAhead": (lambda tree, _: {"base_len": tree["base_len"] + 1}, "guesses", "tree-base-len"),
    "BaseLenFalls": (
        lambda tree, _: {"base_len": tree["base_len"] - 10 * (tree["sequence"] % 2)},
        *("follows-commits", "tree-base-len"),
    ),
    "BaseLenStays": (lambda _, n: {"base_len": 60, "parents": [0] * n}, "follows-commits", "follows-commits"),
    "UnknownParents": (lambda _, n: {"parents": [10**9] * n}, "guesses", "tree-parents"),
    "SequenceGaps": (lambda tree, _: {"sequence": 2 * tree["sequence"]}, "follows-commits", "tree-sequence"),
    "NoScores": (lambda _, n: {"scores": [math.nan] * n}, "guesses", "malformed"),
    "OlderGeneration": (lambda tree, _: {"generation": tree["generation"] + 1}, "guesses", "tree-generation"),
    "UnevenTrees": (lambda tree, _: {"tokens": [*tree["tokens"], 1]}, "guesses", "malformed"),
}


class ForeignTokens(Lawful):
    def altered(self, tree: dict[str, Any]) -> None:
        tree["tokens"] = [len(self.vocab) + 5] * len(tree["ids"])


class SilentOne(Lawful):
    """Answers the first Hello, and says nothing of its load after that."""

    def report(self) -> None:
        if self.reported == 0.0 and len(self.targets) > getattr(self, "answered", 0):
            self.answered = len(self.targets)
            super().report()
        self.reported = time.monotonic()


class SlowGreeter(Lawful):
    def take(self, route: bytes, incarnation: bytes, message: dict[str, Any]) -> None:
        if message["type"] == "hello" and incarnation not in self.targets:
            time.sleep(1.5)
        super().take(route, incarnation, message)


class ServesAnyTokenizer(Lawful):
    def take(self, route: bytes, incarnation: bytes, message: dict[str, Any]) -> None:
        if message["type"] == "hello":
            self.tokenizer = message["tokenizer"]
        super().take(route, incarnation, message)


class ServesAnyVersion(Lawful):
    def take(self, route: bytes, incarnation: bytes, message: dict[str, Any]) -> None:
        super().take(route, incarnation, {**message, "oldest": 1} if message["type"] == "hello" else message)


class DiesOfUnknownMessages(Lawful):
    def take(self, route: bytes, incarnation: bytes, message: dict[str, Any]) -> None:
        if message["type"] not in ("hello", "open", "commit", "close", "pause", "resume", "feedback"):
            self.stopped.set()
        super().take(route, incarnation, message)


class StrictFields(Lawful):
    KNOWN = frozenset(
        {field.encode_name for kind in (Hello, Open, Commit, Close) for field in msgspec.structs.fields(kind)}
        | {"type"}
    )

    def take(self, route: bytes, incarnation: bytes, message: dict[str, Any]) -> None:
        if message.keys() <= self.KNOWN:
            super().take(route, incarnation, message)


class DeafToCommits(Lawful):
    def commit(self, *_: Any, **__: Any) -> None:
        """Nothing follows."""


class NeverResyncs(Lawful):
    def send(self, route: bytes, kind: str, **fields: Any) -> None:
        if kind != "resync":
            super().send(route, kind, **fields)


class AlwaysResyncs(Lawful):
    def commit(self, target: Any, session: int, generation: int, **fields: Any) -> None:
        super().commit(target, session=session, generation=generation, **fields)
        self.send(target.route, "resync", session=session, generation=generation, reason="again")


class PushesAfterClose(Lawful):
    """Goes on guessing for what has ended."""

    def close(self, target: Any, session: int, **_: Any) -> None:
        state = target.sessions.pop(session)
        self.ended = [*getattr(self, "ended", []), (target, state)]

    def report(self) -> None:
        super().report()
        for target, state in getattr(self, "ended", []):
            self.extend(target, state, [], 8)


class GreedyOne(Lawful):
    """Guesses whatever is wanted."""

    def extend(self, target: Any, state: Any, tokens: list[int], wanted: int) -> None:  # noqa: ARG002
        super().extend(target, state, tokens, 64)


class CountsRepeats(Lawful):
    """Takes a Commit that came twice for news."""

    def commit(self, target: Any, session: int, generation: int, base_len: int, **fields: Any) -> None:
        state = target.sessions.get(session)
        known = base_len if state is None else max(base_len, min(state.length, base_len + 30))
        super().commit(target, session=session, generation=generation, base_len=known, **fields)


class MixesTargets(Lawful):
    """Has one way for all trees of the last two targets: that to the one that came first."""

    def send(self, route: bytes, kind: str, **fields: Any) -> None:
        routes = [target.route for target in self.targets.values()][-2:]
        super().send(routes[0] if kind == "tree" else route, kind, **fields)


class DiesOfGarbage(Lawful):
    def receive(self, route: bytes, incarnation: bytes, *frames: bytes) -> None:
        for frame in frames:
            try:
                msgspec.msgpack.decode(frame, strict=False)
            except Exception:
                self.stopped.set()
        super().receive(route, incarnation, *frames)


class KeepsClosed(Lawful):
    def close(self, *_: Any, **__: Any) -> None:
        """Nothing is freed."""


class ReadsTooMuch(Lawful):
    def altered(self, tree: dict[str, Any]) -> None:
        where = {"session": tree["session"], "generation": tree["generation"]}
        for target in self.targets.values():
            if tree["session"] in target.sessions:
                super().send(target.route, "progress", **where, read=10**6)


class Babbles(Lawful):
    numbers = itertools.count()

    def report(self) -> None:
        super().report()
        for target in self.targets.values():
            self.send(target.route, "gossip", number=next(self.numbers))


class FalseEcho(Lawful):
    def send(self, route: bytes, kind: str, **fields: Any) -> None:
        own = {"echo": {"sent": 1, "heard": 12345, "held": 0}} if kind == "load" else {}
        super().send(route, kind, **fields, **own)


class Pausing(Lawful):
    """Says that it can do what it cannot."""

    def send(self, route: bytes, kind: str, **fields: Any) -> None:
        own = {"capabilities": ["prefix_keys", "errors"]} if kind == "load" else {}
        super().send(route, kind, **fields, **own)


#: Each with the check that shows it, and with what has to fail then.
BROKEN: tuple[tuple[type[Lawful], str, str], ...] = (
    *((altering(name, change), check, rule) for name, (change, check, rule) in ALTERED.items()),
    (DeadParents, "follows-commits", "tree-parents"),
    (ForeignTokens, "guesses", "tree-vocabulary"),
    (SilentOne, "load-often", "load-often"),
    (SlowGreeter, "answers-hello", "answers-hello"),
    (ServesAnyTokenizer, "refuses-tokenizer", "refuses-tokenizer"),
    (ServesAnyVersion, "refuses-version", "refuses-version"),
    (DiesOfUnknownMessages, "ignores-unknown-messages", "ignores-unknown-messages"),
    (StrictFields, "ignores-unknown-fields", "ignores-unknown-fields"),
    (DeafToCommits, "follows-commits", "follows-commits"),
    (NeverResyncs, "resyncs-gaps", "resyncs-gaps"),
    (AlwaysResyncs, "serves-without-complaint", "serves-without-complaint"),
    (PushesAfterClose, "frees-closed", "after-close"),
    (GreedyOne, "stops-at-wanted", "stops-at-wanted"),
    (CountsRepeats, "ignores-repeats", "tree-base-len"),
    (MixesTargets, "keeps-targets-apart", "tree-session"),
    (DiesOfGarbage, "survives-garbage", "survives-garbage"),
    (KeepsClosed, "frees-closed", "frees-closed"),
    (ReadsTooMuch, "guesses", "progress"),
    (Babbles, "load-often", "unknown-type"),
    (FalseEcho, "load-often", "echo"),
    (Pausing, "names-unknown-messages", "names-unknown-messages"),
    (Pausing, "prefix-keys", "prefix-keys"),
)


@contextmanager
def listening(kind: type[Lawful]) -> Iterator[str]:
    """The drafter on a thread of its own; where it listens."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        drafter = kind(socket)
        with running(drafter.run, drafter.stopped.set):
            yield f"tcp://127.0.0.1:{port}"
