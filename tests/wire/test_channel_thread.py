"""The thread of a channel: order, threads, handlers that raise, an end that sends what was posted."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from unittest.mock import Mock

import pytest
from ends import LONG, introduce
from loopback import Loopback

from pilotfish.wire.channel import ChannelThread, Received
from pilotfish.wire.sockets import DialingChannel, ListeningChannel

POOL = b"0"


def received(end: Loopback, count: int) -> list[bytes]:
    frames: list[bytes] = []
    while len(frames) < count:
        frames += [x.frame for x in end.receive(5.0)]
    return frames


def nothing(*_: object) -> None:
    """Whatever is heard."""


def test_frames_arrive_in_order_and_a_handler_that_raises_loses_only_its_own(caplog: pytest.LogCaptureFixture) -> None:
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
    owner, fail = ChannelThread(here, period=10.0), Mock(side_effect=ValueError("not today"))
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


def test_what_comes_while_other_threads_send_is_received(
    listen: Callable[..., ListeningChannel], dial: Callable[..., DialingChannel], tmp_path: Path
) -> None:
    """Both ways at once, then one by one: nothing else wakes the threads that receive."""
    count = 3000
    listening = listen(f"ipc://{tmp_path}/pool", high_water=0)
    dialing = dial(f"ipc://{tmp_path}/pool", high_water=0)
    peers = {dialing: POOL, listening: introduce(dialing, listening).peer}
    owners, heard = list[ChannelThread](), {channel: SimpleQueue[bytes]() for channel in peers}
    for channel in peers:
        owners.append(ChannelThread(channel, period=100 * LONG))
        owners[-1].start(lambda one, queue=heard[channel]: queue.put(bytes(one.frame)), nothing)  # type: ignore[misc]

    def post(owner: ChannelThread, channel: DialingChannel | ListeningChannel) -> None:
        for number in range(count):
            owner.post(peers[channel], b"%d" % number)

    threads = [threading.Thread(target=post, args=pair) for pair in zip(owners, peers, strict=True)]
    for thread in threads:
        thread.start()
    expected = [b"%d" % number for number in range(count)]
    for queue in heard.values():
        assert [queue.get(timeout=LONG) for _ in expected] == expected
    for _ in range(200):
        for owner, (channel, peer) in zip(owners, peers.items(), strict=True):
            owner.post(peer, b"one more")
            (other,) = (queue for of, queue in heard.items() if of is not channel)
            assert other.get(timeout=LONG) == b"one more"
    for owner in owners:
        owner.close()


def test_whoever_posts_after_the_end_is_not_harmed(listen: Callable[..., ListeningChannel], tmp_path: Path) -> None:
    owner = ChannelThread(listen(f"ipc://{tmp_path}/pool"))
    owner.start(nothing, nothing)
    owner.close()
    owner.post(POOL, b"too late")
