"""Targets that come and go while they are dialled, and servers that end before or after that. Nobody listens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from attending import status

from pilotfish.config.engine import EngineConfig
from pilotfish.config.server import ServerConfig
from pilotfish.core.routing.held_prefixes import Held
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.targets import fleet as fleet_module
from pilotfish.engine.targets.async_engine import AsyncEngine
from pilotfish.engine.targets.fleet import Fleet
from pilotfish.engine.targets.members import Member
from pilotfish.errors import InputError, ParameterError, TargetUnavailable
from pilotfish.wire.serving import EngineRequest

pytestmark = pytest.mark.anyio
STATUS = status()


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
    fleet._handle(fleet.replicas[0], STATUS)
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
    fleet._handle(replica, STATUS)
    fleet._handle(replica, Held(1, [b"12345678"], whole=True))
    assert fleet.routing.held.expected(replica.id) == 0 and not fleet.routing._loads  # type: ignore[attr-defined]


async def test_a_host_without_an_address_is_told_of_once(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fleet_module, "REDIAL", 0.01)

    def checked(endpoint: str, _: object) -> None:
        raise ParameterError("target_pool", endpoint, "a host with an address")

    engine._fleet._channel.checked = checked  # type: ignore[method-assign, assignment]
    await engine.set_targets([Member("tcp://t:7000")])
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
    with pytest.raises(InputError, match=r"^target_key: .* cannot be read"):
        await engine.start()
    await engine.close()
