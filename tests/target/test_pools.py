"""What a target thinks of a pool: alive, silent, refusing, broken."""

from __future__ import annotations

import logging

import pytest

from pilotfish.core.messages import Load
from pilotfish.target.pools import FIRST_GREETING, GREETING, MAX_FAULTS, PAUSE, SILENCE, Pool


def load(sessions: int = 0, own: int = 0) -> Load:
    return Load("draft", sessions, own, 0, 100, 1.0, 1.0)


@pytest.fixture
def pool() -> Pool:
    return Pool("tcp://pool", b"0")


def test_it_is_ready_once_it_has_answered(pool: Pool) -> None:
    assert not pool.ready
    pool.heard(load(), 1.0)
    assert pool.ready and pool.load == load()


def test_it_is_greeted_often_until_it_answers_then_now_and_then(pool: Pool) -> None:
    assert pool.hello_due(0.0) and not pool.hello_due(FIRST_GREETING / 2) and pool.hello_due(FIRST_GREETING)
    pool.heard(load(), 0.1)
    assert not pool.hello_due(FIRST_GREETING + GREETING / 2) and pool.hello_due(FIRST_GREETING + GREETING)


def test_silence_loses_it_and_an_answer_brings_it_back(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    pool.heard(load(), 10.0)
    pool.tick(10.0 + SILENCE)
    assert pool.ready
    with caplog.at_level(logging.WARNING):
        pool.tick(10.1 + SILENCE)
        pool.tick(10.2 + SILENCE)
    assert not pool.ready and pool.losses == 1 and len(caplog.records) == 1
    pool.heard(load(), 15.0)
    assert pool.ready


def test_a_refusal_is_told_once_and_can_be_taken_back(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    pool.heard(load(), 0.0)
    with caplog.at_level(logging.WARNING):
        pool.refused("another tokenizer", 1.0)
        pool.refused("another tokenizer", 2.0)
    assert not pool.ready and pool.refusal == "another tokenizer" and len(caplog.records) == 1
    pool.heard(load(), 2.0 + GREETING / 2)  # one that changes its mind all the time is no use
    assert not pool.ready
    pool.heard(load(), 2.0 + GREETING)
    assert pool.ready and pool.refusal is None


def test_faults_have_it_left_alone(pool: Pool) -> None:
    pool.heard(load(), 0.0)
    assert [pool.fault(1.0) for _ in range(MAX_FAULTS)] == [False] * (MAX_FAULTS - 1) + [True]
    assert not pool.ready
    assert not any(pool.fault(1.0 + PAUSE / 2) for _ in range(2 * MAX_FAULTS))
    pool.heard(load(), 0.9 + PAUSE)
    assert not pool.ready
    pool.heard(load(), 1.0 + PAUSE)
    assert pool.ready


def test_its_load_is_what_others_have_and_what_it_will_have_of_ours(pool: Pool) -> None:
    pool.sessions |= {1, 2}
    assert pool.expected_load == 2
    pool.heard(load(sessions=7, own=1), 0.0)
    assert pool.expected_load == 8
    pool.heard(load(sessions=0, own=5), 0.0)  # nonsense
    assert pool.expected_load == 2
