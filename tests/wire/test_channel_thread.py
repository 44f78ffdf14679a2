"""The thread of a channel: order, threads, handlers that raise, an end that sends what was posted."""

from __future__ import annotations

import logging
import threading

import pytest
from loopback import Loopback

from pilotfish.wire.channel import ChannelThread, Received

POOL = b"0"


def received(end: Loopback, count: int) -> list[bytes]:
    frames: list[bytes] = []
    while len(frames) < count:
        frames += [x.frame for x in end.receive(5.0)]
    return frames


def nothing(*_: object) -> None:
    """Whatever is heard."""


def test_frames_leave_in_order_from_several_threads() -> None:
    here, there = Loopback.pair(b"target")
    owner = ChannelThread(here)
    owner.start(nothing, nothing)

    def post(name: int) -> None:
        for number in range(100):
            owner.post(POOL, bytes([name, number]))

    threads = [threading.Thread(target=post, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    frames = received(there, 400)
    for thread in threads:
        thread.join()
    owner.close()
    for name in range(4):
        assert [frame[1] for frame in frames if frame[0] == name] == list(range(100))
    assert len(frames) == 400


def test_frames_arrive_in_order_and_a_handler_that_raises_loses_only_its_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here, there = Loopback.pair(b"target")
    heard: list[bytes] = []
    done = threading.Event()

    def handle(frame: Received) -> None:
        if frame.frame == b"1":
            raise RuntimeError("no such frame")
        heard.append(frame.frame)
        if frame.frame == b"3":
            done.set()

    owner = ChannelThread(here)
    with caplog.at_level(logging.ERROR):
        owner.start(handle, nothing)
        for number in range(4):
            there.send(b"target", b"%d" % number)
        assert done.wait(5.0)
        owner.close()
    assert heard == [b"0", b"2", b"3"]
    assert "could not be handled" in caplog.text


def test_what_is_posted_while_a_frame_is_handled_goes_out() -> None:
    here, there = Loopback.pair(b"target")
    owner = ChannelThread(here)
    owner.start(lambda frame: owner.post(frame.peer, b"re: " + frame.frame), nothing)
    for number in range(3):
        there.send(b"target", b"%d" % number)
    assert received(there, 3) == [b"re: 0", b"re: 1", b"re: 2"]
    owner.close()


def test_it_ticks_while_nothing_comes_and_survives_a_tick_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    here, _ = Loopback.pair(b"target")
    ticks = threading.Semaphore(0)

    def tick() -> None:
        ticks.release()
        raise RuntimeError("no time")

    owner = ChannelThread(here, period=0.001)
    with caplog.at_level(logging.CRITICAL):
        owner.start(nothing, tick)
        assert all(ticks.acquire(timeout=5.0) for _ in range(3))
        owner.close()


def test_close_sends_what_was_posted() -> None:
    """Closing twice is fine, and closing what never began."""
    here, there = Loopback.pair(b"target")
    owner = ChannelThread(here, period=10.0)
    owner.start(nothing, nothing)
    for number in range(50):
        owner.post(POOL, bytes([number]))
    owner.close()
    assert [x.frame[0] for x in there.receive(0.0)] == list(range(50))
    owner.close()
    ChannelThread(here).close()


def test_a_call_runs_on_the_thread_after_what_was_posted() -> None:
    here, there = Loopback.pair(b"target")
    owner = ChannelThread(here, period=10.0)
    owner.start(nothing, nothing)
    owner.post(POOL, b"before")
    name = owner.call(lambda: (threading.current_thread().name, [x.frame for x in there.receive(0.0)]))
    assert name.result(5.0) == ("channel", [b"before"])
    owner.close()


def test_a_call_that_raises_tells_only_its_caller() -> None:
    here, there = Loopback.pair(b"target")
    owner = ChannelThread(here, period=10.0)

    def fail() -> None:
        raise ValueError("not today")

    failing = owner.call(fail)
    cancelled = owner.call(fail)
    assert cancelled.cancel()
    owner.start(nothing, nothing)
    with pytest.raises(ValueError, match="not today"):
        failing.result(5.0)
    owner.post(POOL, b"after")
    assert received(there, 1) == [b"after"]
    last = owner.call(lambda: 7)
    owner.close()
    assert last.result(0.0) == 7
