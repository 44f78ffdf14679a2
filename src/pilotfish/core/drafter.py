"""The one protocol that a target knows of a draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pilotfish.core.request import Request
from pilotfish.core.tree import TokenTree


class Drafter(Protocol):
    """Guesses what comes next. Whatever it answers, no output changes."""

    def propose(self, requests: Sequence[Request]) -> list[TokenTree]:
        """A tree below each request's last committed token; an empty tree is always right."""

    def commit(self, request: Request, tokens: Sequence[int]) -> None:
        """`tokens` were just added to `request`: re-root."""

    def close(self, request: Request) -> None:
        """Free what is held for `request`: it has ended, or it lost its KV and may be proposed for again later.
        Requests never proposed for are closed as well."""


class NoDrafter:
    """Mode `off`: every tree is empty, every step is plain decoding."""

    def propose(self, requests: Sequence[Request]) -> list[TokenTree]:
        return [TokenTree() for _ in requests]

    def commit(self, request: Request, tokens: Sequence[int]) -> None:
        """Nothing is held."""

    def close(self, request: Request) -> None:
        """Nothing is held."""
