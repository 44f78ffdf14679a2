"""Peers as their bench sees them."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from pilotfish.bench.peers.protocol import Generated, PeerReady, Question
from pilotfish.bench.programs import Program
from pilotfish.engine.processes.process import WorkerSpec

#: OpenMP's threads of other engines wait as their users have them, awake for some milliseconds. Ours sleep, and whoever
#: imports anything of ours has said so; this says otherwise to GNU's, whose default it is.
AWAKE = {"GOMP_SPINCOUNT": "300000"}


def start_peer(name: str, module: str, setup: str, cores: frozenset[int] = frozenset()) -> Program:
    """The peer of a module of this package, loading, on some cores; empty: on those of this process."""
    command = [sys.executable, "-m", f"{__package__}.{module}", setup]
    environment = {} if module == "pilotfish_peer" else AWAKE
    return Program(WorkerSpec(name, command, cores, environment), stdin=subprocess.PIPE)


def ready(peer: Program) -> PeerReady:
    """Waits until it is loaded; EngineError, with the last line that it wrote, where it ends instead."""
    return msgspec.convert(peer.told, PeerReady)


def ask(peer: Program, way: str, question: Question) -> Generated:
    asked = msgspec.structs.replace(question, way=way)
    return msgspec.convert(peer.ask(**msgspec.to_builtins(asked)), Generated)
