"""A pool that answers Hello and then sends whatever could harm. What single trees may not be: tests/core/test_tree_copy.py;
frames that nearly are messages: tests/workers/target_worker/test_mutated_answers.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from time import sleep

import pytest
from played_pools import Honest, Pool, length, tree, wide
from support import VOCAB, assert_idle, make_engine, run
from workers import LOAD, PARAMS, PROMPTS, endpoint_in, eventually, make_quick

from pilotfish.core.drafting.messages import MAX_NODES, Commit, Open, Refuse, Resync, Tree
from pilotfish.core.drafting.pools import MOST_OPENED
from pilotfish.core.peers.fields import MAX_FRAME
from pilotfish.engine.engine import Engine
from pilotfish.wire.channel import encode


def foreign(about: Open | Commit) -> Iterable[bytes]:
    """Trees of sessions that are another pool's, or nobody's."""
    for session, generation in (
        (about.session + 1, about.generation),
        (1 << 52, 1),
        (about.session, about.generation + 1),
    ):
        yield encode(Tree(session, generation, 0, length(about), [1], [0], [5], [-1.0]))


def chain(about: Open | Commit) -> Iterable[bytes]:
    """As many nodes as a frame may have, each below the one before, the first below none."""
    parents = [99_999, *range(1, MAX_NODES)]
    return [tree(about, **wide(MAX_NODES, parents=parents, tokens=[7] * MAX_NODES, scores=[-0.001] * MAX_NODES))]


ATTACKS: dict[str, Callable[[Open | Commit], Iterable[bytes]]] = {
    "foreign sessions": foreign,
    "a million nodes": lambda m: [tree(m, **wide(1_000_000))],
    "as many nodes as a frame may have": lambda m: [tree(m, sequence=i, **wide(MAX_NODES)) for i in range(2)],
    "a chain without a root": chain,
    "tokens outside the vocabulary": lambda m: [tree(m, tokens=[VOCAB]), tree(m, sequence=1, tokens=[(1 << 31) - 1])],
    "garbage": lambda _: [os.urandom(n) for n in (0, 1, 7, 300)] * 20,
    "deep nesting": lambda _: [b"\x91" * 100_000, b"\x81\xa1x" * 50_000],
    "huge frames": lambda _: [bytes(MAX_FRAME)],
    "frames beyond the limit": lambda _: [bytes(MAX_FRAME + 1)],
    "refusal of all": lambda _: [encode(Refuse(0, 0, "no")), LOAD] * 3,
    "Resync each time": lambda m: [encode(Resync(m.session, m.generation, "again"))],
    "a thousand Loads": lambda _: [LOAD] * 1000,
}


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    directory = tmp_path_factory.mktemp("evil")
    pool = Pool(endpoint_in(directory))
    yield pool
    pool.close()


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
