"""Prefill workers that lie, and hand-overs that are late, given up or cut off: outputs stay what they are, and nothing
is held in the end. tests/core/test_handover_machine.py has all that can be told wrongly, without sockets or memory."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from handovers import (
    LENGTHS,
    PARAMS,
    TRANSPORTS,
    WHOLE,
    Meddler,
    begins,
    finish,
    forget,
    handed,
    make_quick,
    meddled_worker,
    outcomes,
    passed,
    prompts,
    reports,
    step_until,
    submit,
    taken,
)
from inline_prefills import arena_of, assert_nothing_left
from msgspec.structs import replace
from sizes import sized
from support import eventually
from workers import LIMIT

from pilotfish.core.peers import peer as peers
from pilotfish.core.peers.fields import Peer
from pilotfish.core.prefilling.prefill_messages import FromPrefill, PrefillLoad, SegmentBytes, SegmentReady
from pilotfish.core.prefilling.prefill_pools import PrefillPool
from pilotfish.core.prefilling.segments import SegmentReference
from pilotfish.engine.engine import Engine
from pilotfish.kv.lanes import URGENT
from pilotfish.workers.prefill import PrefillWorker


@dataclass
class Beside:
    """A target, and a prefill worker in a thread beside it."""

    engine: Engine
    worker: PrefillWorker
    link: Meddler
    expected: list[list[int]]  # what the prompts' outputs are without the worker

    @property
    def pool(self) -> PrefillPool:
        assert self.engine.prefills is not None
        return self.engine.prefills.pools[0]

    def signed(self, reference: SegmentReference, **changes: Any) -> SegmentReference:
        """By the worker, for the target that it heard last."""
        key = self.worker.shared.machine._targets[self.link.peer].mac_key
        return replace(reference, **changes).signed(key)

    def run(self) -> dict[str, int]:
        """The outcomes of the prompts' hand-overs."""
        samples = submit(self.engine)
        assert finish(self.engine, samples) == self.expected
        return outcomes(samples)

    def assert_well(self) -> None:
        """Nothing is held anywhere, and whatever went wrong before, prompts are handed over again."""
        self.link.change = passed
        assert_nothing_left([self.worker], self.engine)
        prefills = self.engine.prefills
        eventually(lambda: prefills is not None and self.pool.takes(1, prefills.handovers._clock()))
        self.forget()
        assert self.run() == WHOLE
        assert_nothing_left([self.worker], self.engine)
        self.forget()

    def forget(self) -> None:
        forget(self.worker.scheduler)
        forget(self.engine.worker.scheduler)


@pytest.fixture(scope="module", params=TRANSPORTS)
def shared(request: pytest.FixtureRequest, llama: Path, expected_outputs: list[list[int]]) -> Iterator[Beside]:
    transports = TRANSPORTS[request.param]
    with TemporaryDirectory(prefix="chaos-") as made, pytest.MonkeyPatch.context() as patch:
        make_quick(patch)
        with (
            meddled_worker(llama, Path(made)) as (worker, link),
            handed(llama, Path(made), prefill_transports=transports) as engine,
        ):
            yield Beside(engine, worker, link, expected_outputs)


@pytest.fixture
def both(shared: Beside) -> Iterator[Beside]:
    """Over each transport; nobody has heard of the prompts yet."""
    yield shared
    shared.assert_well()


#: Over one transport in the suite, where transports have nothing to do with it.
ONE_TRANSPORT = pytest.mark.parametrize("shared", sized(["shm"], list(TRANSPORTS)), indirect=True)

# -- a worker that lies

#: What becomes of the message about the second segment of each hand-over.
Harm = Callable[[Beside, Any], Iterable[FromPrefill]]
#: Of the three prompts that have a second segment, and of the one that has none.
PARTLY = {"refused": 3, "whole": 1}


def told(change: Callable[[Beside, SegmentReference], SegmentReference]) -> Harm:
    return lambda found, message: [SegmentReady(change(found, message.reference))]


def flipped(found: Beside, reference: SegmentReference) -> SegmentReference:
    """A bit flips in the worker's memory."""
    arena = arena_of(found.worker)
    arena.memory[arena.plan.place_at(reference.place) + reference.size // 3] ^= 4
    return reference


OTHER_CONTENT = told(lambda found, r: found.signed(r, content=r.content ^ 1))
LIES: list[tuple[str, type[Any], Harm, dict[str, int]]] = [
    ("shm", SegmentReady, told(lambda _, r: replace(r, place=r.place ^ 1)), {"forged": 3}),
    ("shm", SegmentReady, told(lambda found, r: found.signed(r, place=1 << 30)), {"out_of_range": 3}),
    ("ipc", SegmentReady, told(lambda found, r: found.signed(r, place=r.place ^ 1)), {"gone": 3}),
    ("shm", SegmentReady, OTHER_CONTENT, {"content": 3}),
    ("ipc", SegmentReady, OTHER_CONTENT, {"gone": 3}),
    ("shm", SegmentReady, told(flipped), {"content": 3}),
    ("ipc", SegmentReady, told(flipped), {"content": 3}),
    ("ipc", SegmentBytes, lambda _, m: [replace(m, data=m.data[:-1])], {"content": 3}),
]


@pytest.mark.parametrize(("shared", "kind", "harm", "reasons"), LIES, indirect=["shared"])
def test_a_worker_that_lies(kind: type[Any], harm: Harm, reasons: dict[str, int], both: Beside) -> None:
    """Other lies, and messages that are lost, are told to machines alone: tests/core/test_handover_machine.py."""

    def change(_: Peer, message: FromPrefill) -> Iterable[FromPrefill]:
        number = getattr(getattr(message, "reference", message), "number", 0)
        return harm(both, message) if isinstance(message, kind) and number == 1 else [message]

    both.link.change = change
    before, samples = dict(both.pool.drops.counts), submit(both.engine)
    assert finish(both.engine, samples) == both.expected
    refused = {reason: count - before[reason] for reason, count in both.pool.drops.counts.items()}
    assert outcomes(samples) == PARTLY and {reason: n for reason, n in refused.items() if n} == reasons
    pairs = zip(reports(samples), LENGTHS[:3], strict=False)
    assert all(report.tokens != length - 1 for report, length in pairs)


# -- hand-overs that are slow, end early, or cannot be written


@pytest.mark.parametrize("shared", ["ipc"], indirect=True)
def test_a_link_that_is_slow(both: Beside) -> None:
    """What a worker answers to Renewals is behind its segments' bytes, longer than a pool may be silent."""

    def slow(_: Peer, message: FromPrefill) -> Sequence[FromPrefill]:
        if isinstance(message, SegmentBytes):
            time.sleep(0.15)
        return [] if isinstance(message, PrefillLoad) else [message]

    both.link.change = slow
    samples = both.engine.submit(prompts()[0], PARAMS[0])
    assert finish(both.engine, samples) == both.expected[:1]
    (report,) = reports(samples)
    assert report.outcome == "whole" and report.seconds > peers.SILENCE


@ONE_TRANSPORT
@pytest.mark.parametrize("writes", [False, True], ids=["read", "written"])
def test_slots_given_back_are_not_written(writes: bool, both: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort does not wait for a segment that is being read, which comes to nothing; it waits for one that is being
    written."""
    assert both.engine.prefills is not None
    handovers = both.engine.prefills.handovers
    name = "_write" if writes else "_data"
    write, held = handovers._write, getattr(handovers, name)
    began, may_end, all_done = threading.Event(), threading.Event(), threading.Event()
    written = list[range]()

    def hold(*arguments: Any) -> Any:
        began.set()
        assert may_end.wait(LIMIT)
        return held(*arguments)

    def noted(slots: Any, layers: range, data: Any) -> None:
        (hold if writes else write)(slots, layers, data)
        written.append(layers)

    monkeypatch.setattr(handovers, name, hold)
    monkeypatch.setattr(handovers, "_write", noted)
    (sample,) = both.engine.submit(prompts()[0], PARAMS[0])
    step_until(both.engine, began.is_set)
    aborting = threading.Thread(target=both.engine.abort, args=(sample,))
    aborting.start()
    aborting.join(0.1 if writes else LIMIT)
    assert aborting.is_alive() == writes and not written
    may_end.set()
    aborting.join()
    handovers._sources[both.pool.peer].lane.put(URGENT, all_done.set)
    assert all_done.wait(LIMIT)
    assert len(written) == writes and reports([sample])[0].outcome == "cancelled"


@ONE_TRANSPORT
def test_a_request_is_aborted_whose_pool_was_lost_as_it_began(both: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which nobody has taken note yet."""
    assert both.engine.prefills is not None
    machine, pool = both.engine.prefills.handovers.machine, both.pool
    begin = machine.begin

    def lost(*arguments: Any) -> Any:
        machine.lost(pool, "it hung up")
        return begin(*arguments)

    monkeypatch.setattr(machine, "begin", lost)
    (sample,) = both.engine.submit(prompts()[0], PARAMS[0])
    both.engine.step()
    both.engine.abort(sample)
    monkeypatch.undo()
    assert [report.outcome for report in reports([sample])] == ["gone"]


def test_an_engine_is_closed_in_mid_transfer(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_quick(monkeypatch)
    with meddled_worker(llama, tmp_path) as (worker, link), handed(llama, tmp_path) as engine:
        link.change = begins
        submit(engine)
        step_until(engine, lambda: taken(engine) > 0)
        engine.close()
        assert_nothing_left([worker], engine)


@ONE_TRANSPORT
@pytest.mark.parametrize("written", [False, True])
def test_a_segment_that_cannot_be_written(written: bool, both: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what was written of it is used."""
    assert both.engine.prefills is not None
    handovers, calls = both.engine.prefills.handovers, list[range]()
    write = handovers._write

    def broken(slots: Any, layers: range, data: Any) -> None:
        calls.append(layers)
        if len(calls) == 2:
            write(slots, layers, data if written else np.zeros_like(data))
            raise MemoryError("there is none")
        write(slots, layers, data)

    monkeypatch.setattr(handovers, "_write", broken)
    found = both.run()
    assert sum(count for outcome, count in found.items() if outcome != "whole") == 1
