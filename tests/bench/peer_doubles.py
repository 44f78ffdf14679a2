"""Peers in the test's own process."""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec

from pilotfish.bench.peers.protocol import LoadedPeer, Question


class InlinePeer:
    """Stands in for the process of a peer."""

    def __init__(self, peer: LoadedPeer) -> None:
        self.peer = peer
        self.told = msgspec.to_builtins(peer.ready)

    def ask(self, **asked: Any) -> Any:
        question = msgspec.convert(asked, Question)
        return msgspec.to_builtins(self.peer.ways[question.way](question))


def start_inline(
    name: str,  # noqa: ARG001  # as start_peer has it
    module: str,
    setup: str,
    cores: frozenset[int] = frozenset(),  # noqa: ARG001
) -> AbstractContextManager[InlinePeer]:
    """Stands in for `start_peer`."""
    return nullcontext(InlinePeer(importlib.import_module(f"pilotfish.bench.peers.{module}").load(setup)))
