"""Whatever texts a pool sends, none of it reaches a terminal or a log raw."""

import logging
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from side import Side, load, make_request
from wire_samples import HOSTILE, assert_nothing_raw, hostile_messages, kinds, mistyped_messages

from pilotfish import cli
from pilotfish.core.drafting.messages import Refuse, ToTarget
from pilotfish.core.drafting.pools import MAX_FAULTS, DraftPool
from pilotfish.engine.drafts.remote_drafts import RemoteDrafts
from pilotfish.errors import ModelError
from pilotfish.wire.channel import Received

#: As whom a message about a session can come: of the first one opened, and of the whole connection.
ABOUT = ({}, {"session": 1, "generation": 1}, {"session": 0, "generation": 0})
HEARD = [
    (f"{kind.__name__}.{place} {about}", frame)
    for kind in kinds(ToTarget)
    for about in ABOUT
    for place, frame in hostile_messages(kind, **(about if "session" in kind.__struct_fields__ else {}))
]
BROKEN = [(f"{kind.__name__}.{place}", frame) for kind in kinds(ToTarget) for place, frame in mistyped_messages(kind)]


def problem_of(pool: DraftPool) -> str | None:
    """What a command that waits for the pool ends with."""
    drafts = cast(RemoteDrafts, SimpleNamespace(_worker_down=lambda: None))
    return RemoteDrafts._in_vain(drafts, pool)


@pytest.mark.parametrize("frame", [frame for _, frame in HEARD], ids=[name for name, _ in HEARD])
def test_texts(frame: bytes, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    side = Side()
    side.propose(make_request())
    with caplog.at_level(logging.DEBUG):
        side.drafter.receive(Received(b"0", frame))
        side.let_pass(100.0)
        side.hear(load())
    if (problem := problem_of(side.pools[0])) is not None:
        assert cli._fail(str(ModelError(problem)), 2) == 2
    assert_nothing_raw(caplog.records, capfd.readouterr().err)


@pytest.mark.parametrize("frame", [frame for _, frame in BROKEN], ids=[name for name, _ in BROKEN])
def test_complaints(frame: bytes, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    side = Side()
    with caplog.at_level(logging.DEBUG):
        for _ in range(MAX_FAULTS + 1):
            side.drafter.receive(Received(b"0", frame))
    if isinstance(msgspec.msgpack.decode(frame)["type"], str) and "unknown_messages" in side.drops():
        assert len(caplog.records) == 1 and side.pools[0].ready  # a newer draft may send it
    else:
        assert len(caplog.records) == 2 and not side.pools[0].ready
    assert_nothing_raw(caplog.records, capfd.readouterr().err)


@pytest.mark.parametrize("session", [0, 1])
def test_a_reason_is_shown_escaped(session: int, caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    side = Side()
    side.propose(make_request())
    frame = msgspec.msgpack.encode({"type": "refuse", "session": session, "generation": session, "reason": HOSTILE})
    with caplog.at_level(logging.WARNING):
        side.drafter.receive(Received(b"0", frame))
    (record,) = caplog.records
    assert r"owned\x1b[31m\x1b]0;owned\x07\r\n\x08\x7f\x9b2J\u202e\u2028forged" in record.getMessage()
    if session == 0:
        problem = problem_of(side.pools[0])
        assert problem is not None and cli._fail(problem, 2) == 2
        assert r"owned\x1b[31m" in capfd.readouterr().err


def test_a_reason_of_full_length_stays_one() -> None:
    """Escaped it would be longer than a text may be."""
    refuse = Refuse(0, 0, "\x1b" * 1024)
    assert len(refuse.reason) == 1024 and refuse.reason.isprintable()
