"""Hand-overs that are late, given up or cut off: outputs stay what they are, and nothing is held in the end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bad_channel import BadChannel
from handovers import (
    PARAMS,
    TRANSPORTS,
    WHOLE,
    Beside,
    Gate,
    Side,
    begins,
    beside,
    lost,
    make_quick,
    outcomes,
    passed,
    prompts,
    reports,
    step_until,
    taken,
)
from inline_prefills import assert_nothing_left, held
from msgspec.structs import replace
from sizes import paired, sized
from support import assert_idle, make_engine, run
from workers import endpoint_in, eventually

from pilotfish.core.peers import peer as peers
from pilotfish.core.peers.fields import Peer
from pilotfish.core.prefilling import handover_machine
from pilotfish.core.prefilling.prefill_messages import (
    Fetch,
    FromPrefill,
    PrefillLoad,
    Renewal,
    SegmentBytes,
    SegmentReady,
    ToPrefill,
)
from pilotfish.core.prefilling.segments import SegmentReference
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.pools import remote_pools
from pilotfish.engine.prefills import handovers as engine_handovers
from pilotfish.kv.readers import SharedMemoryReader
from pilotfish.model.kv_copy import HostCopier
from pilotfish.wire.channel import encode
from pilotfish.wire.sockets import DialingChannel

Start = Callable[..., Any]


@pytest.fixture
def start(llama: Path, tmp_path: Path, expected_outputs: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> Start:
    make_quick(monkeypatch)
    return partial(beside, llama, tmp_path, expected_outputs)


#: Over one transport in the suite, where transports have nothing to do with it.
ONE_TRANSPORT = pytest.mark.parametrize("both", sized(["shm"], list(TRANSPORTS)), indirect=True)


@pytest.fixture(params=TRANSPORTS)
def both(request: pytest.FixtureRequest, start: Start) -> Iterator[Beside]:
    with start(prefill_transports=TRANSPORTS[request.param]) as found:
        yield found


def others(engine: Any) -> list[list[int]]:
    """Outputs of other prompts, which need as many slots."""
    return run(engine, prompts(seed=7), PARAMS)


@pytest.fixture(scope="module")
def expected_others(llama: Path) -> list[list[int]]:
    with make_engine(llama) as engine:
        return others(engine)


# -- a link, or a worker, that stands still


@pytest.mark.parametrize(("direction", "after"), paired(["to_target", "to_worker"], [0, 2]))
def test_a_link_that_is_half_open(direction: str, after: int, start: Start) -> None:
    """Nobody hangs up: what is sent one way is swallowed. The worker frees what it held once the lease is over."""
    with start({"lease": 1.0}, prefill_transports=()) as found:

        def swallow(_: Peer, message: FromPrefill) -> Sequence[FromPrefill]:
            if isinstance(message, SegmentReady) and message.reference.number >= after:
                setattr(found.link, direction, lost)
                return [] if direction == "to_target" else [message]
            return [message]

        found.link.to_target = swallow
        samples = found.submit()
        found.finish(samples)
        assert outcomes(samples).keys() <= {"gone", "stalled", "whole"} and outcomes(samples).get("whole", 0) < 4
        assert_idle(found.engine)
        eventually(lambda: not any(held(found.worker).values()))
        found.assert_well()


def test_a_link_that_is_slow(start: Start) -> None:
    """What a worker answers to Renewals is behind its segments' bytes, longer than a pool may be silent."""
    with start(prefill_transports=()) as found:

        def slow(_: Peer, message: FromPrefill) -> Sequence[FromPrefill]:
            if isinstance(message, SegmentBytes):
                time.sleep(0.15)
            return [] if isinstance(message, PrefillLoad) else [message]

        found.link.to_target = slow
        (sample,) = found.engine.submit(prompts()[0], PARAMS[0])
        while found.engine.busy:
            found.engine.step()
        assert sample.token_ids == found.expected[0]
        (report,) = reports([sample])
        assert report.outcome == "whole" and report.seconds > peers.SILENCE
        found.assert_well()


def test_what_comes_after_a_stall_comes_to_nobody(both: Beside, expected_others: list[list[int]]) -> None:
    """All that a worker sends is held back until its hand-overs were given up and their slots are other requests'."""
    late: list[tuple[Peer, FromPrefill]] = []

    def hold(peer: Peer, message: FromPrefill) -> Sequence[FromPrefill]:
        late.append((peer, message))
        return []

    both.link.to_target = hold
    samples = both.submit()
    both.finish(samples)
    assert set(outcomes(samples)) <= {"gone", "stalled"} and any(isinstance(m, SegmentReady) for _, m in late)
    both.forget_here()
    waiting = [s for tokens, params in zip(prompts(7), PARAMS, strict=True) for s in both.engine.submit(tokens, params)]
    both.engine.step()
    both.link.to_target = passed
    for peer, message in late:
        both.worker.shared._post(peer, encode(message))
    while both.engine.busy:
        both.engine.step()
        both.engine.check()
    assert [sample.token_ids for sample in waiting] == expected_others
    both.assert_well()


def test_a_segment_is_read_when_its_slots_are_other_requests(
    start: Start, expected_others: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that reads stands still when it has checked all of a segment, until others compute with its slots."""
    with start(prefill_transports=("shm",), kv_slots=1024) as found:
        gate = Gate(engine_handovers.converted, after=1)
        monkeypatch.setattr(engine_handovers, "converted", gate)
        samples = found.submit()
        step_until(found.engine, gate.reached.is_set)
        found.finish(samples)
        assert gate.calls == 2 and "stalled" in outcomes(samples)
        found.forget_here()
        waiting = [s for t, p in zip(prompts(7), PARAMS, strict=True) for s in found.engine.submit(t, p)]
        step_until(found.engine, lambda: all(sample.token_ids for sample in waiting))
        gate.open.set()
        eventually(lambda: not found.handovers._sources[found.pool.peer].lane.waiting)
        while found.engine.busy:
            found.engine.step()
        assert [sample.token_ids for sample in waiting] == expected_others
        found.assert_well()


# -- leases


def test_a_lease_that_ends_while_segments_are_on_their_way(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker frees what the target is about to read, and gives it to others. `Renewal`s name nothing."""
    monkeypatch.setattr(handover_machine, "STALL", 30.0)
    with start({"lease": 1.0}, prefill_transports=("shm",)) as found:
        found.link.to_worker = lambda _, m: [replace(m, handovers=[]) if isinstance(m, Renewal) else m]
        gate = Gate(SharedMemoryReader.read, after=1)
        monkeypatch.setattr(SharedMemoryReader, "read", lambda *arguments: gate(*arguments))
        samples = found.submit()
        step_until(found.engine, gate.reached.is_set)
        step_until(found.engine, lambda: not found.worker.shared.machine.orders)
        assert found.worker.shared.machine.counts.ended["expired"] == 4
        gate.open.set()
        found.finish(samples)
        assert outcomes(samples) == {"refused": 4} and found.pool.refused["stale"] == 4
        found.assert_well()


def test_a_lease_that_ends_before_segments_are_fetched(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover_machine, "STALL", 30.0)
    with start({"lease": 1.0}, prefill_transports=()) as found:
        held_back: list[Fetch] = []

        def hold(_: Peer, message: ToPrefill) -> Sequence[ToPrefill]:
            if isinstance(message, Fetch):
                held_back.append(message)
                return []
            message = replace(message, handovers=[]) if isinstance(message, Renewal) else message
            return [message] if found.worker.shared.machine.orders else [message, *held_back]

        found.link.to_worker = hold
        samples = found.submit()
        found.finish(samples)
        assert outcomes(samples) == {"refused": 4} and found.pool.refused["gone"] == 4
        found.assert_well()


# -- a worker that ends, and one at its address


def test_a_worker_in_the_place_of_another_one(
    llama: Path, tmp_path: Path, expected_outputs: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """References of the first are nothing to the second's, though numbers, tokens and places are the same."""
    make_quick(monkeypatch)
    side, old = Side(llama, tmp_path), dict[tuple[int, int], SegmentReference]()

    def keep(_: Peer, message: FromPrefill) -> Sequence[FromPrefill]:
        if isinstance(message, SegmentReady):
            old[message.reference.handover, message.reference.number] = message.reference
        return [message]

    def replay(_: Peer, message: FromPrefill) -> Sequence[FromPrefill]:
        if isinstance(message, SegmentReady) and message.reference.number == 1:
            return [SegmentReady(old[message.reference.handover, 1])]
        return [message]

    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        worker, link = first.enter_context(side.worker())
        link.to_target = keep
        pools = {"prefill_pool": (endpoint_in(tmp_path),), "prefill_threshold": "1"}
        engine = stack.enter_context(make_engine(llama, **pools))
        found = Beside(engine, worker, link, expected_outputs)
        assert found.run() == WHOLE
        assert_nothing_left([worker], engine)
        first.close()
        eventually(lambda: not found.pool.ready)
        found.forget_here()
        assert found.run() == {}
        worker, link = stack.enter_context(side.worker())
        found = Beside(engine, worker, link, expected_outputs)
        eventually(lambda: found.pool.ready)
        found.forget_here()
        found.handovers.machine._next = 1  # or no number would be the same
        link.to_target = replay
        assert found.run() == {"refused": 3, "whole": 1}
        assert found.pool.refused["forged"] == 3
        found.assert_well()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_worker_ends_while_its_segments_are_read(
    transport: str, llama: Path, tmp_path: Path, expected_outputs: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its places are freed and its memory closed; what a target has mapped stays."""
    make_quick(monkeypatch)
    gate = Gate(HostCopier.write_layers, after=1)
    with ExitStack() as stack:
        first = stack.enter_context(ExitStack())
        worker, link = first.enter_context(Side(llama, tmp_path).worker())
        pools = {"prefill_pool": (endpoint_in(tmp_path),), "prefill_threshold": "1"}
        engine = stack.enter_context(make_engine(llama, **pools, prefill_transports=TRANSPORTS[transport]))
        found = Beside(engine, worker, link, expected_outputs)
        monkeypatch.setattr(HostCopier, "write_layers", lambda *arguments: gate(*arguments))
        samples = found.submit()
        step_until(engine, gate.reached.is_set)
        first.close()
        gate.open.set()
        found.finish(samples)
        assert set(outcomes(samples)) <= {"failed", "gone", "refused", "whole"} and outcomes(samples) != WHOLE
        assert_nothing_left([], engine)


# -- requests that end, give way, or share


@ONE_TRANSPORT
def test_a_request_is_aborted_in_mid_transfer(both: Beside) -> None:
    both.link.to_target = begins
    samples = both.submit()
    step_until(both.engine, lambda: taken(both.engine) > 0)
    both.engine.abort(samples[0])
    assert reports(samples[:1])[0].outcome == "cancelled"
    for sample in samples[1:]:
        both.engine.abort(sample)
    both.assert_well()


@ONE_TRANSPORT
def test_an_abort_waits_for_a_segment_that_is_being_written(both: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nobody writes to its slots any more."""
    gate, threads = Gate(HostCopier.write_layers, after=1), list[threading.Thread]()
    monkeypatch.setattr(HostCopier, "write_layers", lambda *arguments: gate(*arguments))
    (sample,) = both.engine.submit(prompts()[0], PARAMS[0])
    step_until(both.engine, gate.reached.is_set)
    threads.append(threading.Thread(target=both.engine.abort, args=(sample,)))
    threads[0].start()
    eventually(lambda: not both.handovers.machine.busy)
    threads[0].join(0.1)
    assert threads[0].is_alive()
    calls = gate.calls
    gate.open.set()
    threads[0].join()
    assert gate.calls == calls and reports([sample])[0].outcome == "cancelled"
    both.assert_well()


@ONE_TRANSPORT
def test_an_engine_is_closed_in_mid_transfer(both: Beside) -> None:
    both.link.to_target = begins
    both.submit()
    step_until(both.engine, lambda: taken(both.engine) > 0)
    both.engine.close()
    assert_nothing_left([both.worker], both.engine)


def test_a_request_gives_way_while_it_waits(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its slots are taken by an older one, its hand-over comes to nothing, and begins anew later."""
    for name in ("STALL", "LONGEST_STALL"):
        monkeypatch.setattr(handover_machine, name, 30.0)
    old, young = prompts()[3], prompts()[0]
    asked = SamplingParams(max_tokens=200, seed=3, ignore_eos=True)
    with start(kv_slots=512, prefix_cache=False) as found:
        with make_engine(found.engine.config.target) as combined:
            expected = run(combined, [old, young], [asked, PARAMS[0]])
        found.link.to_target = begins
        found.engine.worker.scheduler.headroom = 0
        samples = [*found.engine.submit(old, asked), *found.engine.submit(young, PARAMS[0])]
        step_until(found.engine, lambda: found.engine.worker.scheduler.preemptions > 0)
        assert [report.outcome for report in reports(samples[1:])] == ["cancelled"]
        found.link.to_target = passed
        while found.engine.busy:
            found.engine.step()
            found.engine.check()
        assert [sample.token_ids for sample in samples] == expected
        assert [report.outcome for report in reports(samples[1:])] == ["cancelled", "whole"]
        assert_nothing_left([found.worker], found.engine)


@ONE_TRANSPORT
def test_slots_that_a_hand_over_has_filled_are_shared(both: Beside) -> None:
    """By outputs of the prompt, by requests that come meanwhile and later; also where it brought only a part."""
    both.link.to_target = begins
    first = both.submit()
    step_until(both.engine, lambda: taken(both.engine) > 0)
    second = both.submit()
    while both.engine.busy:
        both.engine.step()
        both.engine.check()
    third = both.submit()
    for samples in (third, first, second):
        both.finish(samples)
    both.assert_well()


# -- a target whose own parts fail


@ONE_TRANSPORT
@pytest.mark.parametrize("written", [False, True])
def test_a_segment_that_cannot_be_written(written: bool, both: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor what was written of it is used."""
    write, calls = HostCopier.write_layers, list[range]()

    def broken(copier: HostCopier, slots: Any, layers: range, data: Any) -> None:
        calls.append(layers)
        if len(calls) == 2:
            write(copier, slots, layers, data if written else np.zeros_like(data))
            raise MemoryError("there is none")
        write(copier, slots, layers, data)

    monkeypatch.setattr(HostCopier, "write_layers", broken)
    samples = both.submit()
    both.finish(samples)
    assert sum(count for outcome, count in outcomes(samples).items() if outcome != "whole") == 1
    both.assert_well()


# -- two pools, and a bad network


def test_one_of_two_pools_lies(
    llama: Path, tmp_path: Path, expected_outputs: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left alone, the other one serves."""
    make_quick(monkeypatch)
    with ExitStack() as stack:
        directories = [tmp_path / "a", tmp_path / "b"]
        for directory in directories:
            directory.mkdir()
        sides = [stack.enter_context(Side(llama, directory).worker()) for directory in directories]
        pools = {"prefill_pool": tuple(map(endpoint_in, directories)), "prefill_threshold": "1"}
        engine = stack.enter_context(make_engine(llama, **pools))
        (lying, link), (honest, other) = sides
        link.to_target = lambda _, m: (
            [SegmentReady(replace(m.reference, content=1))] if isinstance(m, SegmentReady) else [m]
        )
        found = Beside(engine, honest, other, expected_outputs)
        for _ in range(6):
            found.run()
            assert_nothing_left([lying, honest], engine)
            found.forget()
        assert engine.prefills is not None
        liar, server = engine.prefills.pools
        assert liar.refused["forged"] > 0 and "whole" not in liar.totals["shm"].outcomes
        assert server.totals["shm"].outcomes.keys() == {"whole"}


FAULTS = {
    "dropped": {"dropped": 0.1},
    "repeated": {"repeated": 0.3},
    "delayed": {"delayed": 1.0},
    "flipped": {"flipped": 0.2},
}


class BadDialing(BadChannel):
    """Otherwise as the channel that it is around."""

    channel: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.channel, name)


@pytest.mark.parametrize(("fault", "transport"), paired(sized(["dropped", "flipped"], list(FAULTS)), list(TRANSPORTS)))
def test_a_bad_network(
    fault: str,
    transport: str,
    llama: Path,
    tmp_path: Path,
    expected_outputs: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Frames of both directions are lost, repeated, out of order or damaged, also those of a fetched segment."""
    make_quick(monkeypatch)
    ends: list[BadDialing] = []

    def worse(channel: Any) -> BadDialing:
        ends.append(BadDialing(channel, len(ends), FAULTS[fault], 0.02))
        ends[-1].bad = False
        return ends[-1]

    def dialing(*arguments: Any, **named: Any) -> BadDialing:
        return worse(DialingChannel(*arguments, **named))

    monkeypatch.setattr(remote_pools, "DialingChannel", dialing)
    with Side(llama, tmp_path, {"lease": 1.0}, worse).worker() as (worker, link):
        pools = {"prefill_pool": (endpoint_in(tmp_path),), "prefill_threshold": "1"}
        with make_engine(llama, **pools, prefill_transports=TRANSPORTS[transport]) as engine:
            found = Beside(engine, worker, link, expected_outputs)
            for end in ends:
                end.bad = True
            while not all(end.counts[fault] > 10 for end in ends):
                found.run()
                found.forget_here()
            for end in ends:
                end.bad = False
            found.assert_well()
