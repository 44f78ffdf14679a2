"""What a target drops of a pool's messages is counted by reason, and said once, then now and then."""

from __future__ import annotations

import logging

import msgspec
import pytest
from side import NODES, VOCAB, Side, load, make_request, tree

from pilotfish.core.drafting.messages import CONNECTION, Open, Pause, Refuse, Resync
from pilotfish.core.drafting.pools import DRAFT_REASONS, DraftPool
from pilotfish.core.peers.fields import Error, Notice
from pilotfish.core.peers.peer import FIRST_PAUSE, Drops
from pilotfish.wire.channel import Received


def test_each_reason_is_counted_for_its_pool() -> None:
    side, request = Side(pools=2), make_request()

    def reopened() -> Open:
        side.now += 20.0
        side.hear(load())
        side.hear(load(), b"1")
        return side.opened(request)

    def push(message: Open, sequence: int, *nodes: tuple[int, int, int, float]) -> None:
        side.hear(tree(message, sequence, len(request.tokens), *nodes))

    side.pools[1].refused("busy", side.now)  # so that all sessions are the first's
    side.pools[1]._left_alone_until = 1e9
    message = reopened()
    push(message, 0, *NODES)
    push(message, 0, *NODES)  # stale
    push(message, 1, (4, 0, 7, -0.5), (5, 99, 8, -0.5))  # repeated, late
    push(message, 2, (6, 0, VOCAB, -0.5))  # against the protocol
    message = reopened()
    push(message, 1, *NODES)  # a gap
    message = reopened()
    side.hear(Resync(message.session, message.generation, "lost"))
    message = reopened()
    side.hear(Refuse(message.session, message.generation, "too long"))
    side.hear(Refuse(CONNECTION, 0, "not you"))
    side.drafter.receive(Received(b"0", b"\xc1"))
    side.drafter.receive(Received(b"0", msgspec.msgpack.encode({"type": "greeting"})))
    side.hear(Error("malformed", "open", "what is this"))
    message = reopened()
    side.hear(Pause(message.session, message.generation))
    assert side.drops() == {**dict.fromkeys(DRAFT_REASONS, 1), "refusals": 2}
    assert side.drops(1) == {"refusals": 1}


def test_the_first_of_a_reason_is_logged_and_then_how_many_more() -> None:
    notices: list[Notice] = []
    drops = Drops("pool 0", notices, DRAFT_REASONS, DraftPool.FAULTS)
    for second in range(1000):
        drops.add("malformed_frames", 2, float(second), "no map")
        drops.add("late_nodes", 1, float(second))
        drops.add("gaps", 0, float(second))
    faults = [n.text for n in notices if n.level == logging.WARNING]
    assert faults[0] == "pool 0: frames that are no message: 2 (no map)"
    assert faults[1] == f"pool 0: frames that are no message: 120 in {FIRST_PAUSE:.0f} s (no map)"
    normal = [n.text for n in notices if n.level == logging.INFO]
    assert len(faults) == len(normal) == 5  # after 60, 120, 240, 480 s more
    assert drops.counts["malformed_frames"] == 2000 and drops.occurred.keys() == {"malformed_frames", "late_nodes"}


@pytest.mark.parametrize(
    ("nodes", "base_len", "said"),
    [
        (((2, 0, 7, -1.0), (1, 0, 8, -1.0)), 5, "ids do not rise"),
        (((1, 0, 7, -1.0),), 9, "base_len 9 is not 5 to 5"),
        (((1, 0, VOCAB, -1.0),), 5, "a token that is not in the vocabulary"),
    ],
)
def test_the_log_says_how_nodes_broke_the_protocol(
    nodes: tuple[tuple[int, int, int, float], ...], base_len: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    side, request = Side(), make_request()
    message = side.opened(request)
    with caplog.at_level(logging.WARNING):
        side.hear(tree(message, 0, base_len, *nodes))
    assert [r.message for r in caplog.records] == [f"pool 0: nodes against the protocol: {len(nodes)} ({said})"]
