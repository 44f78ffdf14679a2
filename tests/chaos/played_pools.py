"""A pool that a test plays: it answers Hello, and all that concerns sessions as the test likes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

import zmq
from support import VOCAB
from workers import LOAD

from pilotfish.core.drafting.messages import Commit, Open, Tree
from pilotfish.wire.channel import decode_to_draft, encode

#: What to send on each Open and Commit of a session.
Attack = Callable[[Open | Commit], Iterable[bytes]]


def tree(about: Open | Commit, **fields: object) -> bytes:
    """A lawful first push of one node, but for `fields`."""
    plain = {"sequence": 0, "base_len": length(about), "ids": [1], "parents": [0], "tokens": [5], "scores": [-1.0]}
    return encode(Tree(about.session, about.generation, **{**plain, **fields}))


def length(about: Open | Commit) -> int:
    return len(about.tokens) + (about.base_len if isinstance(about, Commit) else 0)


def wide(size: int, **fields: object) -> dict[str, object]:
    ids = list(range(1, size + 1))
    return {"ids": ids, "parents": [0] * size, "tokens": [i % VOCAB for i in ids], "scores": [-1.0] * size, **fields}


class Honest:
    """Pushes every token as a child of the root: one of them is right."""

    def __init__(self) -> None:
        self._pushes: dict[tuple[int, int], int] = {}

    def __call__(self, message: Open | Commit) -> list[bytes]:
        number = self._pushes.setdefault((message.session, message.generation), 0)
        self._pushes[message.session, message.generation] += 1
        ids = [1 + number * VOCAB + token for token in range(VOCAB)]
        return [tree(message, **wide(VOCAB, sequence=number, ids=ids, tokens=list(range(VOCAB))))]


class Pool:
    """A ROUTER that answers Hello with Load, and everything about a session with an attack."""

    def __init__(self, endpoint: str) -> None:
        self.attack: Attack = lambda m: []  # noqa: ARG005
        self.attacks = 0
        self.endpoint = endpoint
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _serve(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.linger = 0
            router.bind(self.endpoint)
            while not self._stopped.is_set():
                if router.poll(20):
                    route, _incarnation, *frames = router.recv_multipart()
                    for message in map(decode_to_draft, frames):
                        for answer in self._answers(message):
                            router.send_multipart([route, answer])

    def _answers(self, message: object) -> Iterable[bytes]:
        if not isinstance(message, Open | Commit):
            return [LOAD]
        self.attacks += 1
        return self.attack(message)
