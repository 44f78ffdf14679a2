"""Signals that end a process, and those that it was started to ignore."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import uvicorn

from pilotfish.engine.processes import process
from pilotfish.engine.processes.process import PARENT, Signals, Stopped
from pilotfish.server import main

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _background() -> Iterator[None]:
    """As a process that `nohup` starts in the background."""
    before = {number: signal.getsignal(number) for number in NUMBERS}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_pool_keeps_ignoring_what_it_was_started_to_ignore() -> None:
    with Signals() as signals:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGHUP)
        assert not signals.received
        with pytest.raises(Stopped):
            signal.raise_signal(signal.SIGTERM)


def test_a_worker_hears_of_its_parents_end_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARENT, "1")
    with Signals() as signals, pytest.raises(Stopped):
        signal.raise_signal(signal.SIGHUP)
    assert signals.received == signal.SIGHUP


def test_a_signal_that_was_lost_while_an_object_was_deleted_stops_the_loop() -> None:
    class Deleted:
        def __del__(self) -> None:
            with suppress(Stopped):  # as the interpreter does
                signal.raise_signal(signal.SIGTERM)

    stopped: list[int] = []
    with Signals() as signals:
        Deleted()
        signals.call(lambda: stopped.append(signals.received))
        assert stopped == [signal.SIGTERM]


def test_a_library_that_fails_over_a_signal_ends_the_worker_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clean-up may raise something else than the signal did. What the loop raises counts."""
    monkeypatch.setattr(process, "name_process", lambda _: None)
    monkeypatch.setattr(process, "die_with_parent", lambda _: None)

    def load(_: Signals) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            raise UnboundLocalError("clean-up")

    def serve(signals: Signals) -> None:
        signals.call(lambda: None)
        load(signals)

    process.run_worker("a worker", load)
    with pytest.raises(UnboundLocalError, match="clean-up"):
        process.run_worker("a worker", serve)


#: A channel that signals wake, of which others come between any two lines of a handler.
HANDLERS = """
import signal, sys
from types import FrameType
from pilotfish.engine.processes.process import Signals
from pilotfish.wire.sockets import DialingChannel

def another(frame: FrameType, event: str, argument: object) -> object:
    signal.raise_signal(signal.SIGHUP)
    return another

channel = DialingChannel((sys.argv[1],), b"1")
with Signals() as signals:
    signals.call(channel.wake)
    sys.settrace(another)
    signal.raise_signal(signal.SIGTERM)
    channel.close()
    sys.settrace(None)
    print(signals.received == signal.SIGHUP)
"""


def test_signals_that_come_while_one_is_handled_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """As those do that tell of a parent's end: one for each of its threads."""
    command = [sys.executable, "-c", HANDLERS, f"ipc://{tmp_path}/nobody"]
    started = {**os.environ, PARENT: str(os.getpid())}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=started)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("foreground", [False, True])
def test_a_server_drains_on_sigterm_and_in_the_foreground_on_ctrl_c_too(foreground: bool) -> None:
    if foreground:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    ended: list[int] = []

    async def receive(number: int) -> None:
        server = main._Server(uvicorn.Config("none", log_config=None), lambda: ended.append(number), None)
        with server.capture_signals():
            signal.raise_signal(number)
            await asyncio.sleep(0.01)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.run(receive(number))
    assert ended == ([signal.SIGTERM, signal.SIGINT] if foreground else [signal.SIGTERM])
