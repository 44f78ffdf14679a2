"""Whatever texts a target and a server exchange, none of it reaches a terminal, a log or an error raw."""

import asyncio
import logging
import time
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from attending import open_requests, status
from loopback import Loopback
from support import make_engine
from wire_samples import HOSTILE, assert_nothing_raw, hostile_messages, kinds, mistyped_messages

from pilotfish import cli
from pilotfish.config.engine import EngineConfig
from pilotfish.config.server import ServerConfig
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.targets.async_engine import AsyncEngine
from pilotfish.engine.targets.members import Member
from pilotfish.engine.targets.replica import Replica
from pilotfish.engine.targets.servers import Attendance, Servers
from pilotfish.engine.targets.target_process import TargetService
from pilotfish.errors import WireError
from pilotfish.wire.channel import Received, decoded, encode
from pilotfish.wire.serving import SERVER_DECODER, EngineRequest, Failure, ToServer, ToTarget

STATUS = status()
ANSWERS = [
    (f"{kind.__name__}.{place}", frame)
    for kind in kinds(ToServer)
    for place, frame in (*hostile_messages(kind), *hostile_messages(kind, ids=[1]), *mistyped_messages(kind))
]


def _servable(frame: bytes) -> bytes:
    """Meant for the target, and with a prompt, so that the rest is looked at."""
    message = {**msgspec.msgpack.decode(frame, strict=False), "incarnation": "here"}
    if isinstance(message.get("request"), dict):
        message["request"]["tokens"] = [5]
    return msgspec.msgpack.encode(message)


REQUESTS = [
    (f"{kind.__name__}.{place}", frame)
    for kind in kinds(ToTarget)
    for place, frame in (
        *hostile_messages(kind),
        *((place, _servable(frame)) for place, frame in hostile_messages(kind)),
        *mistyped_messages(kind),
    )
]


def test_what_a_target_says(llama: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    """Its messages end requests, whose errors are shown, and are what `health` tells."""
    errors: list[str] = []

    async def hear(frame: bytes) -> None:
        engine = AsyncEngine(EngineConfig(target=llama), ServerConfig(replicas=0))
        fleet, replica = engine._fleet, Replica(Member("ipc:///t"), time.monotonic)
        fleet._loop, fleet.replicas, fleet._by_peer = asyncio.get_running_loop(), [replica], {b"target": replica}
        fleet._dialling = {replica: asyncio.create_task(asyncio.sleep(0))}
        fleet._take_status(replica, STATUS)
        stream = engine.submit([EngineRequest([5], SamplingParams())])
        fleet._receive(Received(b"target", frame))
        await asyncio.sleep(0)
        if not open_requests(engine):
            try:
                await anext(stream)
            except StopAsyncIteration:
                pass
            except Exception as error:
                errors.append(str(error))
        errors.append(engine.health.reason)

    with caplog.at_level(logging.DEBUG):
        for _, frame in ANSWERS:
            asyncio.run(hear(frame))
    assert any("owned" in error for error in errors) and any("owned" in record.message for record in caplog.records)
    for error in errors:
        assert error.isprintable() and cli._fail(error, 1) == 1
    records = [record for record in caplog.records if record.name != "asyncio"]
    assert_nothing_raw(records, capfd.readouterr().err)


def test_what_a_server_says(llama: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    """What a target cannot serve it answers with a Failure."""
    engine, (channel, server) = make_engine(llama), Loopback.pair(b"target")
    servers = Servers(channel)
    servers.incarnation = "here"
    service = TargetService(engine, servers)
    with caplog.at_level(logging.DEBUG), closing(servers):
        servers._receive(Received(b"0", encode(Attendance(servers.incarnation).attend())))
        for _, frame in REQUESTS:
            servers._known[b"0"].malformed = 0  # only the first one is logged
            servers._receive(Received(b"0", frame))
            for asked in servers.take(0):
                service._take(asked)
        servers.start()
        servers._thread.call(lambda: None).result(1.0)
    for answer in server.receive(0.1):
        message = decoded(SERVER_DECODER, answer.frame)
        assert not isinstance(message, Failure) or message.reason.isprintable()
    assert any("owned" in record.message for record in caplog.records)
    assert_nothing_raw(caplog.records, capfd.readouterr().err)
    engine.abort_all()


def test_an_error_of_a_frame_is_one_line() -> None:
    with pytest.raises(WireError) as caught:
        decoded(SERVER_DECODER, b"\x81\xa4type\xa6" + HOSTILE.encode()[:6])
    assert str(caught.value).isprintable()
