"""What a target thinks of a pool: alive, silent, refusing, broken; and which one drafts for a request."""

import logging

import pytest
from msgspec import structs

from pilotfish.core.drafting.messages import PROTOCOL_VERSION, Hello, Load, Open
from pilotfish.core.drafting.pools import MAX_FAULTS, PAUSE, DraftPool
from pilotfish.core.drafting.target_machine import RemoteOptions, TargetMachine
from pilotfish.core.peers.peer import BACK, FIRST_GREETING, GREETING, SILENCE
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import Request

LOAD = Load("draft", 0, 0, 0, 100, 1.0, 1.0)


@pytest.fixture
def pool() -> DraftPool:
    return DraftPool("tcp://pool", b"0")


def test_it_is_greeted_often_until_it_answers_then_now_and_then(pool: DraftPool) -> None:
    assert pool.hello_due(0.0) and not pool.hello_due(FIRST_GREETING / 2) and pool.hello_due(FIRST_GREETING)
    pool.heard_load(LOAD, 0.1)
    assert not pool.hello_due(FIRST_GREETING + GREETING / 2) and pool.hello_due(FIRST_GREETING + GREETING)


def test_silence_loses_it_and_an_answer_brings_it_back(pool: DraftPool) -> None:
    pool.heard_load(LOAD, 10.0)
    pool.tick(10.0 + SILENCE)
    assert pool.ready
    pool.tick(10.1 + SILENCE)
    pool.tick(10.2 + SILENCE)
    assert not pool.ready and pool._unreported_losses == 1 and [n.level for n in pool.notices] == [logging.WARNING]
    pool.heard_load(LOAD, 15.0)
    assert pool.ready


@pytest.mark.parametrize("serving", [False, True])
def test_a_refusal_is_told_once_and_can_be_taken_back(serving: bool, pool: DraftPool) -> None:
    if serving:
        pool.heard_load(LOAD, 0.0)
    for second in range(1, 3):
        pool.refused("another tokenizer", second)
    assert not pool.ready and pool.refusal == "another tokenizer"
    pool.heard_load(LOAD, 2.0 + GREETING / 2)  # one that changes its mind all the time is no use
    assert not pool.ready
    pool.heard_load(LOAD, 2.0 + GREETING)
    assert pool.ready and pool.refusal is None
    pool.heard_load(LOAD, 2.0 + GREETING + BACK)
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
            pool.heard_load(structs.replace(LOAD, target_digest=told), 0.0)
        assert pool.ready
    assert [len(pool.notices) for pool in pools.values()] == [0, 0, 1]
    (notice,) = pools["b" * 64].notices
    assert notice.text.startswith(
        "tcp://pool: it expects features of a target with other embeddings (aaaaaaaaaaaa, not b"
    )


def test_faults_have_it_left_alone(pool: DraftPool) -> None:
    pool.heard_load(LOAD, 0.0)
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
    pool.heard_load(LOAD, 0.9 + PAUSE)
    assert not pool.ready
    pool.heard_load(LOAD, 1.0 + PAUSE)
    assert pool.ready


def machine_with(*revisions: str) -> TargetMachine:
    """Over pools that answer, named after their revisions."""
    pools = [DraftPool(revision, revision.encode()) for revision in revisions]
    machine = TargetMachine(Hello(PROTOCOL_VERSION, "digest", 64, "target"), pools, RemoteOptions(wanted=40))
    for pool in pools:
        machine.receive(pool, structs.replace(LOAD, revision=pool.name), 0.0)
    return machine


def opened_at(machine: TargetMachine, request: Request) -> list[str]:
    machine.propose([request], 8, 0.1)
    found = [outgoing.peer.decode() for outgoing in machine.outbox if isinstance(outgoing.message, Open)]
    machine.outbox.clear()
    return found


@pytest.mark.parametrize(("draft", "pools"), [("r1", ["r1"]), ("r2", ["r2"]), ("r3", []), ("", ["r1"])])
def test_a_request_is_drafted_for_by_the_revision_that_it_names(draft: str, pools: list[str]) -> None:
    machine = machine_with("r1", "r2")
    assert opened_at(machine, Request(1, [5, 6], SamplingParams(), 7, frozenset(), 50, draft=draft)) == pools


def test_it_goes_to_a_pool_of_that_revision_once_there_is_one() -> None:
    machine, request = machine_with("r1"), Request(1, [5, 6], SamplingParams(), 7, frozenset(), 50, draft="r2")
    assert opened_at(machine, request) == []
    machine.join(late := DraftPool("late", b"late"))
    machine.receive(late, structs.replace(LOAD, revision="r2"), 0.2)
    assert opened_at(machine, request) == ["late"]
