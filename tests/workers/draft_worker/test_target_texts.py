"""Whatever texts a target sends, none of it reaches a draft's terminal or log raw, and none is sent back raw."""

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rig import HELLO, Rig, make_open
from wire_samples import assert_nothing_raw, hostile_messages, kinds, mistyped_messages

from pilotfish.core.drafting.messages import PROTOCOL_VERSION, ToDraft
from pilotfish.wire.channel import Received

#: Of a Hello, so that what comes after is looked at.
KNOWN: tuple[dict[str, Any], ...] = (
    {"version": PROTOCOL_VERSION},
    {"version": PROTOCOL_VERSION, "tokenizer": HELLO.tokenizer},
)
FRAMES = [
    (f"{kind.__name__}.{place}", frame)
    for kind in kinds(ToDraft)
    for place, frame in (
        *hostile_messages(kind),
        *(frame for known in KNOWN if kind.__name__ == "Hello" for frame in hostile_messages(kind, **known)),
        *mistyped_messages(kind),
    )
]


@pytest.mark.parametrize("greeted", [False, True])
def test_texts(greeted: bool, llama: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    rig = Rig(llama)
    answers = 0
    for number, (_, frame) in enumerate(FRAMES):
        peer = b"target %d" % number
        if greeted:
            rig.say(peer, HELLO, make_open([1, 2, 3]))
        rig.channel.inbox.append(Received(peer, frame))
        with caplog.at_level(logging.DEBUG):
            rig.turns()
        for answer in rig.channel.sent[peer]:
            reason = msgspec.msgpack.decode(answer).get("reason", "")
            assert reason.isprintable()
            answers += bool(reason)
    assert caplog.records if greeted else answers
    assert_nothing_raw(caplog.records, capfd.readouterr().err)
