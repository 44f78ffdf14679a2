"""A pool that answers Hello and then sends whatever could harm."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from time import sleep

import pytest
from played_pools import Attack, Honest, Pool, length, tree, wide
from support import VOCAB, assert_idle, make_engine, run
from workers import LOAD, PARAMS, PROMPTS, endpoint_in, eventually, make_quick

from pilotfish.core.drafting.messages import MAX_NODES, Refuse, Resync, Tree
from pilotfish.core.drafting.pools import MOST_OPENED
from pilotfish.core.peers.fields import MAX_FRAME
from pilotfish.engine.engine import Engine
from pilotfish.wire.channel import encode


def chain(size: int) -> dict[str, object]:
    return wide(size, parents=list(range(size)), tokens=[7] * size, scores=[-0.001] * size)


ATTACKS: dict[str, Attack] = {
    "foreign sessions": lambda m: [
        encode(Tree(s, g, 0, length(m), [1], [0], [5], [-1.0]))
        for s, g in ((m.session + 1, m.generation), (1 << 52, 1), (m.session, m.generation + 1))
    ],
    "cycles": lambda m: [tree(m, ids=[1, 2, 3], parents=[3, 1, 2], tokens=[5, 6, 7], scores=[0.0] * 3)],
    "a node that is its own parent": lambda m: [tree(m, ids=[1, 2], parents=[0, 2], tokens=[5, 6], scores=[0.0] * 2)],
    "unknown parents": lambda m: [tree(m, parents=[99])],
    "ids that fall": lambda m: [tree(m, ids=[9, 8], parents=[0, 0], tokens=[5, 6], scores=[0.0, 0.0])],
    "a million nodes": lambda m: [tree(m, **wide(1_000_000))],
    "as many nodes as a frame may have": lambda m: [tree(m, sequence=i, **wide(MAX_NODES)) for i in range(2)],
    "the same nodes again and again": lambda m: [tree(m, **wide(MAX_NODES, tokens=[5] * MAX_NODES))],
    "a chain of nodes": lambda m: [tree(m, **chain(MAX_NODES))],
    "a chain without a root": lambda m: [tree(m, **{**chain(MAX_NODES), "parents": [99_999, *range(1, MAX_NODES)]})],
    "tokens outside the vocabulary": lambda m: [tree(m, tokens=[VOCAB]), tree(m, sequence=1, tokens=[(1 << 31) - 1])],
    "scores without end": lambda m: [
        tree(m, ids=[1, 2, 3], parents=[0, 1, 1], tokens=[m.tokens[-1], 5, 6], scores=[s] * 3)
        for s in (float("-inf"), float("nan"), -1e308)
    ],
    "base_len of the future": lambda m: [tree(m, base_len=length(m) + 100)],
    "base_len of the past": lambda m: [tree(m, base_len=1)],
    "gaps": lambda m: [tree(m, sequence=i) for i in (0, 7, 3, 1)],
    "lists of unequal length": lambda m: [tree(m, tokens=[])],
    "garbage": lambda _: [os.urandom(n) for n in (0, 1, 7, 300)] * 20,
    "messages cut off": lambda m: [tree(m)[:n] for n in range(0, 60, 7)],
    "deep nesting": lambda _: [b"\x91" * 100_000, b"\x81\xa1x" * 50_000],
    "huge frames": lambda _: [bytes(MAX_FRAME)],
    "frames beyond the limit": lambda _: [bytes(MAX_FRAME + 1)],
    "refusals": lambda m: [encode(Refuse(m.session, m.generation, "no"))] * 3,
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
