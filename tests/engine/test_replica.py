"""A target as a server knows it: when it is ready, when it is given up, which of its messages still count."""

from __future__ import annotations

import pytest
from attending import status

from pilotfish.engine.processes.launch import WorkerState
from pilotfish.engine.targets.members import Member
from pilotfish.engine.targets.replica import ENDLESS, Replica
from pilotfish.engine.targets.servers import Silence

RUNS = WorkerState("target", "running", pid=42)
KILLED = WorkerState("target", "restarting", restarts=1, reason="was ended by signal 9")


def ready(replica: Replica, incarnation: str = "first") -> Replica:
    replica.note_status(status(incarnation))
    return replica


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def replica(clock: Clock) -> Replica:
    """Of a process that runs, and loads."""
    replica = Replica(Member("ipc:///t", name="target"), clock, WorkerState("target"))
    assert not replica.note_worker(RUNS)
    return replica


def test_only_a_process_that_sends_no_beats_is_silent() -> None:
    silence = Silence()
    assert [silence.look(now) for now in (10.0, 10.1, 10.2)] == pytest.approx([0.0, 0.1, 0.2])
    silence.heard()
    assert silence.look(10.3) == pytest.approx(0.1)
    assert silence.look(99.0) == pytest.approx(0.6)  # this process did not look, so it cannot have heard either


def test_a_restart_is_expected_to_take_as_long_as_the_last_start(replica: Replica, clock: Clock) -> None:
    clock.now = 104.0
    assert replica.retry_after == 4.0  # as long again: nothing is known yet
    clock.now = 110.0
    ready(replica)
    clock.now = 200.0
    assert replica.note_worker(KILLED)
    assert replica.obstacle == "target: was ended by signal 9; it is started again"
    clock.now = 203.0
    assert replica.retry_after == 7.0
    clock.now = 220.0
    assert replica.retry_after == 0.0


def test_a_step_that_does_not_end_is_told_of_and_its_target_given_up(replica: Replica) -> None:
    ready(replica)
    for seconds, obstacle, reason in ((1.0, "", ""), (31.0, "target: in one step for 31 s", "")):
        replica.step = seconds
        assert (replica.obstacle, replica.look(30.0)) == (obstacle, reason)
    replica.step = ENDLESS + 1
    assert replica.look(30.0) == "was in one step for 300 s"


def test_a_target_that_was_long_silent_is_not_given_up_at_the_moment_it_is_ready(replica: Replica) -> None:
    """While the thread looks, the loop hears that the target is ready; while that is noted, the thread looks."""
    given_up: list[str] = []

    class Loading(Silence):
        def look(self, now: float) -> float:
            silent = super().look(now)
            if not replica.serving:
                ready(replica)
            return silent

        def heard(self) -> None:
            if replica.serving:
                given_up.append(replica.look(30.0))
            super().heard()

    replica.silence = Loading()
    replica.silence.seconds = 100.0
    given_up.append(replica.look(30.0))
    assert replica.takes and not any(given_up)


def test_a_silent_target_is_no_longer_ready_and_given_up_after_a_while(replica: Replica) -> None:
    ready(replica)
    replica.silence.seconds = 2.5
    assert replica.obstacle == "target: silent for 2 s" and replica.look(30.0) == ""
    replica.silence.seconds = 30.5
    assert replica.look(30.0) == "was silent for 30 s"


def test_the_last_word_of_a_target_that_is_gone_is_no_news(replica: Replica) -> None:
    ready(replica)
    assert replica.note_worker(KILLED) and replica.status is None and not replica.takes
    assert replica.is_last("first") and not replica.is_news("first") and replica.is_news("second")
    replica.note_worker(RUNS)
    assert ready(replica, "second").takes


def test_one_that_drains_takes_nothing_though_nothing_hinders_it(replica: Replica) -> None:
    ready(replica).draining = True
    assert not replica.takes and replica.obstacle == "" and replica.health.reason == "draining"
