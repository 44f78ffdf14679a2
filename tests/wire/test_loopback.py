"""Both ends within one process keep what a channel promises."""

from __future__ import annotations

import threading

from ends import LONG
from loopback import Loopback

from pilotfish.wire.channel import HIGH_WATER, Received


def test_there_and_back_in_order() -> None:
    target, draft = Loopback.pair(b"target")
    assert target.send(b"0", b"1") and target.send(b"0", b"2") and draft.send(b"target", b"3")
    assert draft.receive(0) == [Received(b"target", b"1"), Received(b"target", b"2")]
    assert target.receive(0) == [Received(b"0", b"3")]
    assert draft.receive(0) == target.receive(0) == []


def test_unknown_peers_get_nothing() -> None:
    target, draft = Loopback.pair(b"target", b"pool")
    assert not target.send(b"0", b"") and not draft.send(b"pool", b"")
    assert draft.receive(0) == target.receive(0) == []


def test_too_many_frames_are_lost() -> None:
    target, draft = Loopback.pair(b"target")
    assert [target.send(b"0", b"") for _ in range(HIGH_WATER + 2)] == [True] * HIGH_WATER + [False] * 2
    assert len(draft.receive(0)) == HIGH_WATER and target.send(b"0", b"")


def test_a_frame_or_a_wake_ends_the_wait() -> None:
    target, draft = Loopback.pair(b"target")
    for act, expected in ((draft.wake, []), (lambda: target.send(b"0", b"now"), [Received(b"target", b"now")])):
        result: list[list[Received]] = []
        waiting = threading.Thread(target=lambda out=result: out.append(draft.receive(10 * LONG)))
        waiting.start()
        act()
        waiting.join(LONG)
        assert not waiting.is_alive() and result == [expected]


def test_a_wake_before_waiting_counts_once() -> None:
    target, _ = Loopback.pair(b"target")
    target.wake()
    assert target.receive(10 * LONG) == [] and not target._woken
    target.close()
