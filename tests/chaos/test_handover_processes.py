"""Prefill workers and targets that are killed and stopped in the midst of hand-overs."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from forked import ForkedWorker, forked
from handovers import (
    LENGTHS,
    PARAMS,
    ROWS,
    TRANSPORTS,
    WHOLE,
    begins,
    finish,
    forget,
    handed,
    make_quick,
    meddled_worker,
    outcomes,
    prompts,
    reports,
    step_until,
    submit,
    taken,
    under_way,
)
from inline_prefills import assert_nothing_left, held
from sizes import sized
from support import eventually, make_engine, run
from workers import endpoint_in

from pilotfish.core.prefilling import handover_machine
from pilotfish.engine.engine import Engine
from pilotfish.engine.processes.process import WorkerSpec

#: Seconds of a worker's forward: hand-overs take several.
PACE = "prefill=40ms"
Outputs, Start = list[list[int]], Callable[[], ForkedWorker]


@pytest.fixture
def start(llama: Path, tmp_path: Path) -> Iterator[Callable[[], ForkedWorker]]:
    """Starts a worker at `endpoint_in(tmp_path)`."""
    started: list[ForkedWorker] = []
    options = {"model": llama, "listen": endpoint_in(tmp_path), "dtype": "float32", "kv-slots": 4096, "threads": 1}
    small = {"max-rows": ROWS, "segment-bytes": 1 << 16, "lease": 1, "pace": PACE}
    command = ["", "", "", "prefill", *(f"--{name}={value}" for name, value in {**options, **small}.items())]

    def begin() -> ForkedWorker:
        started.append(ForkedWorker(WorkerSpec("prefill", command)))
        return started[-1]

    yield begin
    for worker in started:
        worker.end()


@pytest.fixture
def engine(
    start: Start,  # noqa: ARG001
    request: pytest.FixtureRequest,
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Engine]:
    """Before any worker has come."""
    make_quick(monkeypatch)
    monkeypatch.setattr("pilotfish.engine.pools.remote_pools.ANSWER", 0.0)
    with handed(llama, tmp_path, prefill_transports=TRANSPORTS[request.param]) as engine:
        yield engine


def mapped() -> int:
    """How often workers' memory is mapped in this process."""
    return Path("/proc/self/maps").read_text().count("memfd:pilotfish segments")


def served(engine: Engine) -> bool:
    assert engine.prefills is not None
    return engine.prefills.pools[0].ready


MOMENTS: dict[str, Callable[[Engine], bool]] = {
    "before": lambda engine: len(under_way(engine)) == 4 and not any(one.segments for one in under_way(engine)),
    "in": lambda engine: taken(engine) > 1 and any(not one.announced_all for one in under_way(engine)),
    "after": lambda engine: not under_way(engine),
}


@pytest.mark.parametrize("moment", sized(["in"], list(MOMENTS)))
@pytest.mark.parametrize("engine", sized(("shm",), tuple(TRANSPORTS)), indirect=True)
def test_a_worker_is_killed(moment: str, engine: Engine, start: Start, expected_outputs: Outputs) -> None:
    """Its memory is given back: whoever maps it keeps it from the worker that is started in its place."""
    before, worker = mapped(), start()
    eventually(lambda: served(engine))
    samples = submit(engine)
    step_until(engine, lambda: MOMENTS[moment](engine))
    worker.end()
    assert finish(engine, samples) == expected_outputs
    assert outcomes(samples) == WHOLE if moment == "after" else "gone" in outcomes(samples)
    brought = sum(report.tokens for report in reports(samples))
    assert (brought > 0) == (moment != "before") and (brought < sum(LENGTHS) - len(LENGTHS)) == (moment != "after")
    assert_nothing_left([], engine)
    eventually(lambda: not served(engine) and mapped() == before)
    start()
    eventually(lambda: served(engine))
    forget(engine.worker.scheduler)
    again = submit(engine)
    assert finish(engine, again) == expected_outputs and outcomes(again) == WHOLE
    assert_nothing_left([], engine)


@pytest.mark.parametrize("engine", sized(("shm",), tuple(TRANSPORTS)), indirect=True)
def test_a_worker_that_is_stopped_goes_on(engine: Engine, start: Start, llama: Path, expected_outputs: Outputs) -> None:
    """When it goes on, its leases are over, and the slots that it was to fill are other requests'."""
    with make_engine(llama) as combined:
        others = run(combined, prompts(7), PARAMS)
    worker = start()
    eventually(lambda: served(engine))
    samples = submit(engine)
    step_until(engine, lambda: MOMENTS["in"](engine))
    worker.stop()
    assert finish(engine, samples) == expected_outputs
    told = outcomes(samples)
    assert set(told) <= {"gone", "stalled", "whole"} and told.get("whole", 0) < len(LENGTHS) - 1
    forget(engine.worker.scheduler)
    waiting = submit(engine, seed=7)
    engine.step()
    worker.go_on()
    assert finish(engine, waiting) == others
    eventually(lambda: served(engine))
    forget(engine.worker.scheduler)
    again = submit(engine)
    assert finish(engine, again) == expected_outputs and outcomes(again) == WHOLE
    assert_nothing_left([], engine)


def hold_leases(target: Path, directory: Path) -> None:
    """A target's process: of its hand-overs two segments have come, and it waits for more, as long as it lives."""
    handover_machine.STALL = handover_machine.LEAST = 60.0
    engine = handed(target, directory)
    finish(engine, submit(engine))


def test_a_target_is_killed_that_holds_leases(
    llama: Path, tmp_path: Path, expected_outputs: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker frees what it held for it when they end; others are served meanwhile."""
    make_quick(monkeypatch)
    with meddled_worker(llama, tmp_path, lease=1.0) as (worker, link):
        link.change, ended = begins, list[str]()
        worker.shared.observe_lease = lambda order: ended.append(order.outcome)
        target = forked(hold_leases, llama, tmp_path)
        eventually(lambda: held(worker)["orders"] >= 3 and held(worker)["places"] >= 2, 60)
        os.kill(target.pid or 0, signal.SIGKILL)
        target.join()
        assert held(worker)["orders"] >= 3
        dead = link.peer
        link.change = lambda peer, message: begins(peer, message) if peer == dead else [message]
        with handed(llama, tmp_path) as engine:
            samples = submit(engine)
            assert finish(engine, samples) == expected_outputs and outcomes(samples) == WHOLE
            assert_nothing_left([worker], engine)
        assert len([outcome for outcome in ended if outcome in ("expired", "gone")]) >= 3
