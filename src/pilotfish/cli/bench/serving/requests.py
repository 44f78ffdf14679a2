"""Requests to a server, in sessions whose turns go on with what it has answered."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

#: Of a chat, as OpenAI's API has them.
Message = Mapping[str, Any]


class ServerRequest(Struct, frozen=True):
    """A turn of a session: its new messages. What makes them leaves the rest of it to the session."""

    messages: Sequence[Message]
    fields: Mapping[str, Any] = {}  # others of the body: response_format
    id: str = ""
    category: str = ""
    max_tokens: int = 0
    temperature: float = 0.0
    seed: int = 0
    session: str = ""
    turn: int = 0


class RequestSession(Struct, frozen=True):
    """Turns, each of which is sent once the one before has been answered."""

    turns: Sequence[ServerRequest]
    at: float = 0.0  # of a trace: seconds after its beginning


def joined(messages: Sequence[Message]) -> str:
    """Messages as one text, for servers' completions: each on lines of its own. The last line is open."""
    return "\n".join(str(message["content"]) for message in messages)
