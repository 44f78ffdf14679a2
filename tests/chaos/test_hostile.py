"""A pool that answers Hello and then sends whatever could harm. What else a tree may not be is in
tests/core/test_tree_copy.py, frames that nearly are messages in tests/workers/target_worker/test_mutated_answers.py."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import zmq
from support import VOCAB, assert_idle, eventually, make_engine, run, running
from workers import LOAD, PARAMS, PROMPTS, endpoint_in, make_quick

from pilotfish.core.drafting.messages import MAX_NODES, Commit, Open, Resync, Tree
from pilotfish.core.drafting.pools import MOST_OPENED
from pilotfish.core.peers.fields import MAX_FRAME
from pilotfish.engine.engine import Engine
from pilotfish.wire.channel import decode_to_draft, encode

#: What to send on each Open and Commit of a session.
Attack = Callable[[Open | Commit], Iterable[bytes]]


def tree(about: Open | Commit, size: int, **fields: object) -> bytes:
    """A lawful push of so many nodes below the root, but for `fields`."""
    length = len(about.tokens) + (about.base_len if isinstance(about, Commit) else 0)
    ids = list(range(1, size + 1))
    nodes = {"ids": ids, "parents": [0] * size, "tokens": [i % VOCAB for i in ids], "scores": [-1.0] * size}
    named = {"session": about.session, "generation": about.generation, "sequence": 0, "base_len": length}
    return encode(Tree(**{**named, **nodes, **fields}))  # type: ignore[arg-type]


class Pool:
    """A ROUTER that answers Hello with Load, and everything about a session with an attack."""

    def __init__(self, endpoint: str) -> None:
        self.attack = ATTACKS["garbage"]
        self.attacks = self.opened = 0
        self.endpoint = endpoint
        self.stopped = threading.Event()

    def serve(self) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
            router.linger = 0
            router.bind(self.endpoint)
            while not self.stopped.is_set():
                if router.poll(20):
                    route, _incarnation, *frames = router.recv_multipart()
                    for message in map(decode_to_draft, frames):
                        for answer in self._answers(message):
                            router.send_multipart([route, answer])

    def _answers(self, message: object) -> Iterable[bytes]:
        if not isinstance(message, Open | Commit):
            return [LOAD]
        self.attacks += 1
        self.opened += isinstance(message, Open)
        return self.attack(message)


def chain_without_a_root(about: Open | Commit) -> Iterable[bytes]:
    parents = [99_999, *range(1, MAX_NODES)]
    return [tree(about, MAX_NODES, parents=parents, tokens=[7] * MAX_NODES, scores=[-0.001] * MAX_NODES)]


ATTACKS: dict[str, Attack] = {
    "another's session": lambda m: [tree(m, 1, session=m.session + 1), tree(m, 1, generation=m.generation + 1)],
    "a million nodes": lambda m: [tree(m, 1_000_000)],
    "a chain without a root": chain_without_a_root,
    "garbage": lambda _: [os.urandom(n) for n in (0, 1, 7, 300)] * 20,
    "deep nesting": lambda _: [b"\x91" * 100_000, b"\x81\xa1x" * 50_000],
    "huge frames": lambda _: [bytes(MAX_FRAME)],
    "Resync each time": lambda m: [encode(Resync(m.session, m.generation, "again"))],
    "a thousand Loads": lambda _: [LOAD] * 1000,
}


@pytest.fixture(scope="module")
def attacked(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pool, Engine]]:
    evil = Pool(endpoint_in(tmp_path_factory.mktemp("evil")))
    with pytest.MonkeyPatch.context() as patch, running(evil.serve, evil.stopped.set):
        make_quick(patch)
        with make_engine(llama, mode="async", drafter="lm", draft_pool=(evil.endpoint,)) as engine:
            yield evil, engine


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_that_a_pool_sends_harms(name: str, attacked: tuple[Pool, Engine], expected: list[list[int]]) -> None:
    """That a pool is forgiven is in tests/workers/target_worker/test_remote.py."""
    evil, engine = attacked
    evil.attacks, evil.attack = 0, ATTACKS[name]
    drafter, opened, runs = engine.remote.drafter, evil.opened, 0
    while evil.attacks < 8:
        assert run(engine, PROMPTS[:8], PARAMS[:8]) == expected[:8]
        runs += 1
    assert evil.opened - opened <= MOST_OPENED * 8 * runs
    assert engine.worker.drafter.drafter is drafter  # it has never raised
    assert_idle(engine)
    eventually(lambda: drafter.machine.pools[0].ready)  # a fault is forgiven
