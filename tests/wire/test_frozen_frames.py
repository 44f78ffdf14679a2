"""The frames of docs/draft-frames.md stand for version 1: they never change, and are read as they always were."""

import hashlib
from typing import Any, get_args

import msgspec
import pytest
from frozen_frames import FRAMES, Frame

from pilotfish.core.drafting.messages import FeatureOffer, Hello, Load, RequestSampling, ToDraft, ToTarget
from pilotfish.core.peers.fields import Echo
from pilotfish.wire.channel import encode

#: Of all frames of the page, in order. Version 1 is frozen: who has to change this line breaks drafts that exist.
FROZEN = "b35b4f411197c037887d0879642702f8462b870195443b5a35dff2e9f307fe23"


NAMES = [f"{frame.title} {'to the target' if frame.to_target else 'to the draft'}" for frame in FRAMES]


def shown(value: Any) -> Any:
    """As the page shows it."""
    if isinstance(value, bytes):
        return f"hex:{value.hex()}"
    if isinstance(value, dict):
        return {str(key): shown(part) for key, part in value.items()}
    return [shown(part) for part in value] if isinstance(value, list) else value


def test_no_frame_has_changed() -> None:
    assert hashlib.sha256(b"".join(frame.data for frame in FRAMES)).hexdigest() == FROZEN


@pytest.mark.parametrize("frame", FRAMES, ids=NAMES)
def test_a_frame_says_what_the_page_says(frame: Frame) -> None:
    assert shown(msgspec.msgpack.decode(frame.data, strict=False)) == frame.values


@pytest.mark.parametrize("frame", FRAMES, ids=NAMES)
def test_a_frame_is_read_and_said_again(frame: Frame) -> None:
    message = frame.decoded(frame.data)
    assert message.__struct_config__.tag == frame.values["type"]
    for name, value in frame.values.items():
        if name != "type":
            assert shown(msgspec.msgpack.decode(encode(getattr(message, name)), strict=False)) == value
    assert frame.decoded(encode(message)) == message


@pytest.mark.parametrize("frame", FRAMES, ids=NAMES)
def test_what_a_newer_side_adds_is_ignored(frame: Frame) -> None:
    newer = msgspec.msgpack.decode(frame.data, strict=False) | {"later": [{"a": 1.5}, None], "": b"\0"}
    if isinstance(newer.get("capabilities"), list):
        newer["capabilities"].append("telepathy")
    message = frame.decoded(frame.data)
    read = frame.decoded(msgspec.msgpack.encode(newer))
    if isinstance(read, Hello | Load):
        assert set(message.capabilities) <= set(read.capabilities) <= {*message.capabilities, "telepathy"}
        read = msgspec.structs.replace(read, capabilities=message.capabilities)
    assert read == message


def test_every_message_and_field_is_there() -> None:
    """Of those that version 1 began with; what came later may be missing where it is optional."""
    for to_target, kinds in ((False, ToDraft), (True, ToTarget)):
        values = [frame.values for frame in FRAMES if frame.to_target == to_target]
        for kind in get_args(kinds):
            own = [one for one in values if one["type"] == kind.__struct_config__.tag]
            fields = {field.encode_name for field in msgspec.structs.fields(kind)}
            assert fields - set().union(*own) <= {"oldest", "version"}, kind  # 1 by default
    (full,) = [frame.values for frame in FRAMES if frame.title == "hello, with all"]
    (opened,) = [frame.values for frame in FRAMES if frame.title == "open, with all"]
    for part, kind in ((full["features"], FeatureOffer), (full["echo"], Echo), (opened["sampling"], RequestSampling)):
        assert {field.encode_name for field in msgspec.structs.fields(kind)} == set(part)
