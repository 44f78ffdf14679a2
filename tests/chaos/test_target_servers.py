"""A target whose servers die, fall silent, or send what is no message: others notice nothing, and nothing is left."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from attending import TARGET, AttendingServer
from sizes import sized
from support import SNIPPETS, assert_idle, make_engine, run
from workers import eventually

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.engine.targets import servers as servers_module
from pilotfish.engine.targets.servers import Attendance, Servers
from pilotfish.engine.targets.target_process import TargetService
from pilotfish.wire.channel import encode
from pilotfish.wire.serving import Abort, Attend, EngineRequest, Failure, Status, Submit
from pilotfish.wire.sockets import DialingChannel, ListeningChannel

LONG = SamplingParams(max_tokens=1800, seed=1, ignore_eos=True)
SHORT = SamplingParams(max_tokens=40, seed=7, temperature=0.8, ignore_eos=True)


class Rig:
    """A target in a thread of this process, at a socket."""

    def __init__(self, engine: Engine, directory: Path) -> None:
        self.engine, self.endpoint = engine, f"ipc://{directory}/target"
        self.servers = Servers(ListeningChannel(self.endpoint))
        self.service = TargetService(engine, self.servers)
        self._thread = threading.Thread(target=self.service.run)
        self._open = ExitStack()
        self.servers.start()
        self._thread.start()

    def server(self, incarnation: bytes = b"") -> AttendingServer:
        channel = DialingChannel([self.endpoint], incarnation or secrets.token_bytes(8))
        server = AttendingServer(self._open.enter_context(closing(channel)))
        server.join()
        return server

    def running(self) -> int:
        return len(self.engine.worker.scheduler.running)

    def close(self) -> None:
        self.service.stop()
        self._thread.join()
        self.servers.close()
        self._open.close()


@pytest.fixture
def rig(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    monkeypatch.setattr(servers_module, "SERVER_SILENCE", 1.5)
    rig = Rig(make_engine(llama, pace="target=4ms"), tmp_path)
    yield rig
    rig.close()
    assert not rig.service._samples
    assert_idle(rig.engine)


@pytest.fixture(scope="module")
def expected(llama: Path) -> list[list[int]]:
    engine = make_engine(llama)
    prompts = [engine.tokenizer.encode(text) for text in SNIPPETS[:4]]
    return [prompts[0], run(engine, prompts[:1], [SHORT])[0]]


def begun(server: AttendingServer, number: int) -> bool:
    server.hear()
    return bool(server.deltas(number))


def lost(server: AttendingServer) -> bool:
    """Whether it knows that its requests are over."""
    server.hear()
    return not server.whole


@pytest.mark.parametrize("how", sized(["silent"], ["killed", "silent"]))
def test_a_server_that_is_gone_loses_its_requests_and_nobody_else_any(
    how: str, rig: Rig, expected: list[list[int]]
) -> None:
    prompt, tokens = expected
    gone, there = rig.server(), rig.server()
    for number in (1, 2):
        gone.submit(number, [5, 6, number], LONG)
    eventually(lambda: begun(gone, 2))
    if how == "killed":
        gone.channel.close()
    there.submit(1, prompt, SHORT)
    assert there.output(1) == tokens

    def all_ended() -> bool:
        there.hear()
        return rig.running() == 0

    eventually(all_ended)
    there.submit(2, prompt, SHORT)
    assert there.output(2) == tokens and there.whole
    if how == "silent":
        eventually(lambda: lost(gone))
        gone.submit(3, prompt, SHORT)
        assert gone.output(3) == tokens


def test_frames_that_are_none_and_messages_of_others_harm_nobody(rig: Rig, expected: list[list[int]]) -> None:
    prompt, tokens = expected
    there, stranger = rig.server(), rig.server()
    incarnation = there.attendance.incarnation
    there.submit(1, prompt, SHORT)
    bad = {"type": "submit", "id": 1, "incarnation": incarnation, "request": {"tokens": "x"}}
    for frame in (
        b"",
        b"\xc1",
        b"\x81",
        secrets.token_bytes(300),
        encode({"type": "attend"}),
        encode([1, 2]),
        encode(bad),
    ):
        stranger.channel.send(TARGET, frame)
    stranger.attendance.sent += 1  # the last one named a request
    unheard = DialingChannel([rig.endpoint], secrets.token_bytes(8))
    with closing(unheard):
        for message in (
            Abort(1, incarnation),
            Submit(1, incarnation, EngineRequest(prompt, LONG)),
            Attend(99, incarnation, 0, 0),
        ):
            unheard.send(TARGET, encode(message))
        stranger.tell(Abort(1, incarnation))  # its own, of which it has none
        stranger.attendance.sent += 1
        assert there.output(1) == tokens and there.whole
        refused = stranger.until(Failure)
        assert refused.ids == [1] and refused.refused and "tokens" in refused.reason
    assert stranger.whole


def test_a_server_that_comes_back_as_itself_goes_on(rig: Rig, expected: list[list[int]]) -> None:
    """Its connection broke off for less than the target's patience: what was told meanwhile is lost, and it knows."""
    prompt, tokens = expected
    first = rig.server(b"the same")
    first.submit(1, prompt, LONG)
    eventually(lambda: begun(first, 1))
    first.channel.close()
    again = AttendingServer(DialingChannel([rig.endpoint], b"the same"))
    with closing(again.channel):
        again.attendance = Attendance(first.attendance.incarnation, first.attendance.sent, first.attendance.sequence)
        eventually(lambda: lost(again))
        again.abort(1)
        again.submit(2, prompt, SHORT)
        assert again.output(2) == tokens
        eventually(lambda: rig.running() == 0)
        assert isinstance(again.until(Status), Status)
