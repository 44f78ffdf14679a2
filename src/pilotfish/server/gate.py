"""Who may come in, and when: what the routes ask for before they ask the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request

from pilotfish.core.sampling_params import SamplingParams
from pilotfish.server.engine import Update


class Caller(Protocol):
    """Who sent a request."""

    @property
    def cache_salt(self) -> str | None:
        """Of the caller's key; None where the request may name its own."""
        ...


@dataclass(frozen=True)
class Demand:
    """What a request would take: `params.n` outputs of each prompt."""

    request_id: str
    prompts: tuple[int, ...]  # tokens of each
    params: SamplingParams
    max_nodes: int | None  # of a tree; 0: no speculation
    chat: bool
    stream: bool
    tag: Any  # as the client names what it is for; None: not at all


class Ticket(Protocol):
    """A request that was let in."""

    def update(self, index: int, update: Update) -> None:
        """Called with all that comes of it: `index` counts the outputs of all prompts."""
        ...

    def close(self, used_tokens: int, error: Exception | None) -> None:
        """It is over, well or not; asyncio.CancelledError's place is taken by ClientGone. Called once."""
        ...


class Gate(Protocol):
    """`identify` and `admit` raise HttpError for whom they turn away."""

    @property
    def closing(self) -> bool:
        """Whether nobody will be let in any more."""
        ...

    def identify(self, request: Request) -> Caller:
        """Before the body is read: 401."""
        ...

    def admit(self, caller: Caller, demand: Demand) -> Ticket:
        """Once the request is known to be sound: 429, 503."""
        ...


class Anyone:
    """The caller of an open server; also the ticket it gets."""

    cache_salt: str | None = None

    def update(self, index: int, update: Update) -> None:
        """Nothing is counted."""

    def close(self, used_tokens: int, error: Exception | None) -> None:
        """Nothing is held."""


class OpenGate:
    """Lets everybody in."""

    closing = False

    def identify(self, request: Request) -> Caller:  # noqa: ARG002
        return Anyone()

    def admit(self, caller: Caller, demand: Demand) -> Ticket:  # noqa: ARG002
        return Anyone()
