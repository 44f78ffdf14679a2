"""What a target thinks of a pool: alive, silent, refusing, broken."""

from __future__ import annotations

import logging

import pytest
from msgspec import structs

from pilotfish.core.drafting.messages import Load
from pilotfish.core.drafting.pools import MAX_FAULTS, PAUSE, DraftPool
from pilotfish.core.peers.peer import BACK, FIRST_GREETING, GREETING, SILENCE


def load(sessions: int = 0, own: int = 0) -> Load:
    return Load("draft", sessions, own, 0, 100, 1.0, 1.0)


@pytest.fixture
def pool() -> DraftPool:
    return DraftPool("tcp://pool", b"0")


def test_it_is_ready_once_it_has_answered(pool: DraftPool) -> None:
    assert not pool.ready
    pool.heard_load(load(), 1.0)
    assert pool.ready and pool.load == load()


def test_it_is_greeted_often_until_it_answers_then_now_and_then(pool: DraftPool) -> None:
    assert pool.hello_due(0.0) and not pool.hello_due(FIRST_GREETING / 2) and pool.hello_due(FIRST_GREETING)
    pool.heard_load(load(), 0.1)
    assert not pool.hello_due(FIRST_GREETING + GREETING / 2) and pool.hello_due(FIRST_GREETING + GREETING)


def test_silence_loses_it_and_an_answer_brings_it_back(pool: DraftPool) -> None:
    pool.heard_load(load(), 10.0)
    pool.tick(10.0 + SILENCE)
    assert pool.ready
    pool.tick(10.1 + SILENCE)
    pool.tick(10.2 + SILENCE)
    assert not pool.ready and pool.losses == 1 and [n.level for n in pool.notices] == [logging.WARNING]
    pool.heard_load(load(), 15.0)
    assert pool.ready


@pytest.mark.parametrize("serving", [False, True])
def test_a_refusal_is_told_once_and_can_be_taken_back(serving: bool, pool: DraftPool) -> None:
    if serving:
        pool.heard_load(load(), 0.0)
    for second in range(1, 3):
        pool.refused("another tokenizer", second)
    assert not pool.ready and pool.refusal == "another tokenizer"
    pool.heard_load(load(), 2.0 + GREETING / 2)  # one that changes its mind all the time is no use
    assert not pool.ready
    pool.heard_load(load(), 2.0 + GREETING)
    assert pool.ready and pool.refusal is None
    pool.heard_load(load(), 2.0 + GREETING + BACK)
    for _ in range(2):
        pool.tick(2.0 + GREETING + BACK)
    assert [n.text for n in pool.notices] == [
        "draft_pool: tcp://pool refused: another tokenizer; the target serves without it",
        "tcp://pool serves this target now; it refused before",
    ]


def test_a_pool_that_refuses_for_ever_new_reasons_gives_few_lines(pool: DraftPool) -> None:
    for second in range(200):
        pool.refused(f"reason {second}", second)
    assert len(pool.notices) == 4 and pool.drops.counts["refusals"] == 200


def test_a_pool_that_expects_another_targets_features_gives_one_line() -> None:
    pools = {digest: DraftPool("tcp://pool", b"0", target_digest=digest) for digest in ("", "a" * 64, "b" * 64)}
    for pool in pools.values():
        for told in ("", "a" * 64, "c" * 64):
            pool.heard_load(structs.replace(load(), target_digest=told), 0.0)
        assert pool.ready
    assert [len(pool.notices) for pool in pools.values()] == [0, 0, 1]
    (notice,) = pools["b" * 64].notices
    assert notice.text.startswith(
        "tcp://pool: it expects features of a target with other embeddings (aaaaaaaaaaaa, not b"
    )


def test_faults_have_it_left_alone(pool: DraftPool) -> None:
    pool.heard_load(load(), 0.0)
    for number in range(MAX_FAULTS):
        assert pool.ready
        pool.malformed(f"frame {number}", 1.0)
    assert not pool.ready
    for number in range(2 * MAX_FAULTS):
        pool.malformed(f"frame {number}", 1.0 + PAUSE / 2)
    assert [n.text for n in pool.notices] == [
        "tcp://pool: frames that are no message: 1 (frame 0)",
        f"tcp://pool is left alone for {PAUSE:g} s: it sent {MAX_FAULTS} frames that are no message",
    ]
    pool.heard_load(load(), 0.9 + PAUSE)
    assert not pool.ready
    pool.heard_load(load(), 1.0 + PAUSE)
    assert pool.ready


def test_its_load_is_what_others_have_and_what_it_will_have_of_ours(pool: DraftPool) -> None:
    pool.sessions |= {1, 2}
    assert pool.expected_load == 2
    pool.heard_load(load(sessions=7, own=1), 0.0)
    assert pool.expected_load == 8
    pool.heard_load(load(sessions=0, own=5), 0.0)  # nonsense
    assert pool.expected_load == 2
