"""Frames: messages as MessagePack maps with a `type`."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from pilotfish.core.messages import MAX_FRAME, ToDraft, ToTarget, Tree
from pilotfish.errors import WireError

Message = TypeVar("Message")

_encoder = msgspec.msgpack.Encoder()
_to_draft: msgspec.msgpack.Decoder[ToDraft] = msgspec.msgpack.Decoder(ToDraft)
_to_target: msgspec.msgpack.Decoder[ToTarget] = msgspec.msgpack.Decoder(ToTarget)


def encode(message: ToDraft | ToTarget) -> bytes:
    return _encoder.encode(message)


def decode_to_draft(frame: bytes) -> ToDraft:
    """WireError for what is no such message."""
    return decoded(_to_draft, frame)


def decode_to_target(frame: bytes) -> ToTarget:
    """WireError for what is no such message, and for a Tree whose lists differ in length."""
    message = decoded(_to_target, frame)
    if (
        isinstance(message, Tree)
        and len({len(x) for x in (message.ids, message.parents, message.tokens, message.scores)}) > 1
    ):
        raise WireError("tree: ids, parents, tokens and scores differ in length")
    return message


def decoded(decoder: msgspec.msgpack.Decoder[Message], frame: bytes) -> Message:
    """WireError for what the decoder does not know."""
    if len(frame) > MAX_FRAME:
        raise WireError(f"frame: {len(frame)} bytes; at most {MAX_FRAME} are allowed")
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"frame: {error}") from error
