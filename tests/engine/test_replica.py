"""A target as a server knows it: when it is ready, when it is given up, which of its messages still count; and targets
that come and go while they are dialled, where nobody listens."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from attending import status
from kv_objects import Clock

from pilotfish.config.engine import EngineConfig
from pilotfish.config.server import ServerConfig
from pilotfish.core.routing.held_prefixes import Held
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.processes.launch import WorkerState
from pilotfish.engine.targets import fleet as fleet_module
from pilotfish.engine.targets.async_engine import AsyncEngine
from pilotfish.engine.targets.fleet import Fleet
from pilotfish.engine.targets.members import Member
from pilotfish.engine.targets.replica import ENDLESS, Replica
from pilotfish.engine.targets.servers import Silence
from pilotfish.errors import InputError, ParameterError, TargetUnavailable
from pilotfish.wire.serving import EngineRequest

pytestmark = pytest.mark.anyio
RUNS = WorkerState("target", "running", pid=42)
KILLED = WorkerState("target", "restarting", restarts=1, reason="was ended by signal 9")


def served(replica: Replica, incarnation: str = "first") -> Replica:
    replica.note_status(status(incarnation))
    return replica


@pytest.fixture
def clock() -> Clock:
    clock = Clock()
    clock.now = 100.0
    return clock


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
    served(replica)
    clock.now = 200.0
    assert replica.note_worker(KILLED)
    assert replica.obstacle == "target: was ended by signal 9; it is started again"
    clock.now = 203.0
    assert replica.retry_after == 7.0
    clock.now = 220.0
    assert replica.retry_after == 0.0


def test_a_step_that_does_not_end_is_told_of_and_its_target_given_up(replica: Replica) -> None:
    served(replica)
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
                served(replica)
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
    served(replica)
    replica.silence.seconds = 2.5
    assert replica.obstacle == "target: silent for 2 s" and replica.look(30.0) == ""
    replica.silence.seconds = 30.5
    assert replica.look(30.0) == "was silent for 30 s"


def test_the_last_word_of_a_target_that_is_gone_is_no_news(replica: Replica) -> None:
    served(replica)
    assert replica.note_worker(KILLED) and replica.status is None and not replica.takes
    replica.note_worker(RUNS)
    assert served(replica, "second").takes
    fleet: Any = Mock()
    for incarnation, news in (("second", False), ("first", False), ("third", True)):
        Fleet._take_news(fleet, replica, incarnation)
        assert fleet._forgotten.called is news and replica.serving is not news


def test_one_that_drains_takes_nothing_though_nothing_hinders_it(replica: Replica) -> None:
    served(replica).draining = True
    assert not replica.takes and replica.obstacle == "" and replica.health.reason == "draining"


# -- while they are dialled


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    """Without a tokenizer."""
    engine = AsyncEngine(EngineConfig(target=Path("/nowhere")), ServerConfig(replicas=0))
    await engine._fleet.start()
    yield engine
    await engine.close()


async def ready(fleet: Fleet, member: Member) -> None:
    """As if a target was there, and had said so."""
    await fleet.set_members([member])
    await asyncio.wait([fleet._dialling[fleet.replicas[0]]])
    fleet._handle(fleet.replicas[0], status())
    fleet.replicas[0].problem = ""


@pytest.fixture
def member(tmp_path: Path) -> Member:
    return Member(f"ipc://{tmp_path}/target")


async def test_one_that_leaves_while_it_is_dialled_is_not_dialled_on(engine: AsyncEngine, member: Member) -> None:
    fleet = engine._fleet
    dial = fleet._channel.dial

    def slowly(*where: Any) -> bytes:
        time.sleep(0.2)
        return dial(*where)

    fleet._channel.dial = slowly  # type: ignore[method-assign]
    await fleet.set_members([member])
    await asyncio.sleep(0.1)
    await fleet.set_members([])
    await asyncio.wrap_future(fleet._thread.call(lambda: None))
    assert not fleet._channel._connections and not fleet._by_peer


async def test_the_last_words_of_one_that_has_left_are_nothing_to_routing(engine: AsyncEngine, member: Member) -> None:
    fleet = engine._fleet
    await ready(fleet, member)
    (replica,) = fleet.replicas
    await fleet.set_members([])
    fleet._handle(replica, status())
    fleet._handle(replica, Held(1, [b"12345678"], whole=True))
    assert fleet.routing.held.expected(replica.id) == 0 and not fleet.routing._loads  # type: ignore[attr-defined]


async def test_a_host_without_an_address_is_told_of_once(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_module, "REDIAL", 0.01)
    unknown = ParameterError("target_pool", "tcp://t:7000", "a host with an address")
    monkeypatch.setattr(engine._fleet._channel, "checked", Mock(side_effect=unknown))
    await engine._fleet.set_members([Member("tcp://t:7000")])
    engine._fleet.replicas[0].silence.seconds = 1000.0
    await asyncio.sleep(0.3)
    assert "a host with an address" in engine.health.reason
    assert [record.name for record in caplog.records] == ["pilotfish.engine.targets.fleet"]


async def test_a_server_that_has_closed_sends_nothing(engine: AsyncEngine, member: Member) -> None:
    await ready(engine._fleet, member)
    assert engine.health.ready
    await engine.close()
    assert engine.health.identity is not None  # routes still read it
    with pytest.raises(TargetUnavailable, match="draining: the server is shutting down"):
        engine.submit([EngineRequest([1], SamplingParams())])


async def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    config = ServerConfig(replicas=0, target_key=tmp_path / "none")
    engine = AsyncEngine(EngineConfig(target=Path("/nowhere")), config)
    with pytest.raises(InputError, match=r"^target_key: .* a file that can be read"):
        await engine.start()
    await engine.close()
