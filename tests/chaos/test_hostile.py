"""A pool that answers Hello and then sends whatever could harm. What else a tree may not be is in
tests/core/test_tree_copy.py, frames that nearly are messages in tests/workers/target_worker/test_mutated_answers.py."""

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import sleep

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


class Honest:
    """Pushes every token as a child of the root: one of them is right."""

    def __init__(self) -> None:
        self._pushes: dict[tuple[int, int], int] = {}

    def __call__(self, message: Open | Commit) -> list[bytes]:
        number = self._pushes.setdefault((message.session, message.generation), 0)
        self._pushes[message.session, message.generation] += 1
        ids = [1 + number * VOCAB + token for token in range(VOCAB)]
        return [tree(message, VOCAB, sequence=number, ids=ids, tokens=list(range(VOCAB)))]


class Pool:
    """A ROUTER that answers Hello with Load, and everything about a session with an attack."""

    def __init__(self, endpoint: str) -> None:
        self.attack: Attack = Honest()
        self.attacks = 0
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
def evil(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(endpoint_in(tmp_path_factory.mktemp("evil")))
    with running(pool.serve, pool.stopped.set):
        yield pool


@pytest.fixture(scope="module")
def engine(evil: Pool, llama: Path) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        with make_engine(llama, mode="async", drafter="lm", draft_pool=(evil.endpoint,)) as engine:
            yield engine


@pytest.mark.parametrize("name", ATTACKS)
def test_nothing_that_a_pool_sends_harms(name: str, evil: Pool, engine: Engine, expected: list[list[int]]) -> None:
    evil.attacks, evil.attack = 0, ATTACKS[name]
    drafter = engine.remote.drafter
    opened = drafter.machine.counts.opened
    runs = 0
    while evil.attacks < 8:
        assert run(engine, PROMPTS[:8], PARAMS[:8]) == expected[:8]
        runs += 1
    assert drafter.machine.counts.opened - opened <= MOST_OPENED * 8 * runs
    assert engine.worker.drafter.drafter is drafter  # it has never raised
    assert_idle(engine)
    evil.attack = Honest()
    hits = drafter.machine.counts.hits
    while drafter.machine.counts.hits == hits:
        eventually(lambda: drafter.machine.pools[0].ready)
        engine.submit(PROMPTS[0], PARAMS[0])
        while engine.busy:
            engine.step()
            sleep(0.005)
