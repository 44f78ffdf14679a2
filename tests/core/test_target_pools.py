"""Which pool drafts for a request: one whose revision it asks for, and none where there is no such pool."""

from __future__ import annotations

import msgspec
import pytest

from pilotfish.core.drafting.messages import PROTOCOL_VERSION, Hello, Load, Open
from pilotfish.core.drafting.pools import DraftPool
from pilotfish.core.drafting.target_machine import RemoteOptions, TargetMachine
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import Request

LOAD = Load("draft", 0, 0, 0, 100, 1.0, 1.0)


def machine_with(*revisions: str) -> TargetMachine:
    """Over pools that answer, named after their revisions."""
    pools = [DraftPool(revision, revision.encode()) for revision in revisions]
    machine = TargetMachine(Hello(PROTOCOL_VERSION, "digest", 64, "target"), pools, RemoteOptions(wanted=40))
    for pool in pools:
        machine.receive(pool, msgspec.structs.replace(LOAD, revision=pool.name), 0.0)
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
    machine.receive(late, msgspec.structs.replace(LOAD, revision="r2"), 0.2)
    assert opened_at(machine, request) == ["late"]
