"""Draft workers that are killed, stopped and replaced while requests run."""

import os
import signal
from pathlib import Path
from random import Random
from time import sleep

import pytest
from sizes import in_soak, sized
from support import assert_idle, drain, eventually, make_engine
from workers import LIMIT, PARAMS, PROMPTS, Start, endpoint_in

from pilotfish.core.drafting.draft_sessions import FORGOTTEN
from pilotfish.engine.engine import Engine
from pilotfish.engine.sample import Sample
from pilotfish.wire.pool_users import RemoteDrafter


def submit_all(engine: Engine) -> list[Sample]:
    return [sample for prompt, params in zip(PROMPTS, PARAMS, strict=True) for sample in engine.submit(prompt, params)]


def finish(engine: Engine, samples: list[Sample]) -> list[list[int]]:
    drain(engine)
    assert all(sample.finish_reason == "length" for sample in samples)
    return [sample.token_ids for sample in samples]


def accepted(samples: list[Sample]) -> int:
    return sum(sample.request.stats.accepted_tokens for sample in samples)


def step_until_drafted(engine: Engine, drafter: RemoteDrafter) -> None:
    """Step until trees come from a pool that serves; a few steps, however long it takes."""
    before = drafter.machine.pools[0].score.trees
    while drafter.machine.pools[0].score.trees == before:
        eventually(lambda: drafter.machine.pools[0].ready)
        assert engine.busy
        engine.step()  # opens the sessions
        for _ in range(50):
            if drafter.machine.pools[0].score.trees == before:
                sleep(0.01)


def step_until_accepted(engine: Engine, samples: list[Sample]) -> None:
    """Step, slowly enough for a draft to keep up, until a token is accepted."""
    before = accepted(samples)
    while accepted(samples) == before:
        assert engine.busy
        engine.step()
        sleep(0.02)


@pytest.mark.usefixtures("quick")
@in_soak
def test_a_worker_is_killed_twenty_times(llama: Path, draft: Path, expected: list[list[int]]) -> None:
    with make_engine(llama, draft=draft, mode="async", drafter="lm", nodes=1) as engine:
        remote = engine.remote
        assert remote is not None
        samples = submit_all(engine)
        for kills in range(1, 21):
            step_until_drafted(engine, remote.drafter)
            pid = remote.workers()[0].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            engine.step()
            eventually(lambda: not remote.pools[0].ready)
            eventually(lambda n=kills: remote.workers()[0].restarts == n)  # type: ignore[misc]
        step_until_drafted(engine, remote.drafter)
        step_until_accepted(engine, samples)
        assert finish(engine, samples) == expected


def test_a_stopped_worker_goes_on(pool: Start, llama: Path, draft: Path, expected: list[list[int]], tmp_path) -> None:
    worker = pool(draft)
    with make_engine(llama, mode="async", drafter="lm", nodes=1, draft_pool=(endpoint_in(tmp_path),)) as engine:
        assert engine.remote is not None
        drafter = engine.remote.drafter
        samples = submit_all(engine)
        step_until_drafted(engine, drafter)
        worker.stop()
        eventually(lambda: not drafter.machine.pools[0].ready)  # of silence: the connection stays
        trees, finished = drafter.machine.pools[0].score.trees, len(PROMPTS) - len(engine._samples)
        while len(PROMPTS) - len(engine._samples) < finished + 20:
            engine.step()
        assert drafter.machine.pools[0].score.trees == trees
        worker.go_on()
        step_until_drafted(engine, drafter)
        step_until_accepted(engine, samples)
        assert finish(engine, samples) == expected


def test_requests_aborted_at_random_leave_nothing(pool: Start, llama: Path, draft: Path, tmp_path: Path) -> None:
    pool(draft)
    rng = Random(4)
    endpoint = endpoint_in(tmp_path)
    with make_engine(llama, mode="async", draft_pool=(endpoint,)) as engine:
        assert engine.remote is not None
        (seen,) = engine.remote.pools
        capacity = seen.load.free_slots
        running: list[Sample] = []
        for i in range(sized(300, 1000)):
            (sample,) = engine.submit(PROMPTS[i % 100][: rng.randrange(1, 40)], PARAMS[i % 100])
            running.append(sample)
            if rng.random() < 0.3:
                engine.step()
            while len(running) > 16 or rng.random() < 0.4:
                engine.abort(running.pop(rng.randrange(len(running))) if running else sample)
        assert engine.remote.drafter.machine.pools[0].score.trees > 0
        engine.abort_all()
        assert_idle(engine)
        machine = engine.remote.drafter.machine
        assert not machine._by_request and not machine.sessions and not seen.sessions
        # So many frames a second fill the draft's queue. Where a Close is lost, its session is forgotten in the end.
        limit = LIMIT + FORGOTTEN
        eventually(
            lambda: (seen.load.sessions, seen.load.own_sessions, seen.load.free_slots) == (0, 0, capacity), limit
        )
