"""Peers as their bench sees them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
from peers.protocol import Generated, PeerReady, Question
from programs import Program

from pilotfish.engine.processes.process import WorkerSpec

BENCHMARKS = str(Path(__file__).parents[1])
#: OpenMP's threads of other engines wait as their users have them, awake for some milliseconds. Ours sleep, and whoever
#: imports anything of ours has said so; this says otherwise to GNU's, whose default it is.
AWAKE = {"GOMP_SPINCOUNT": "300000"}


def start_peer(name: str, module: str, setup: str, cores: frozenset[int] = frozenset()) -> Program:
    """The peer of a module of this package, loading, on some cores; empty: on those of this process."""
    path = os.pathsep.join((BENCHMARKS, os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", f"peers.{module}", setup]
    environment = {"PYTHONPATH": path, **({} if module == "pilotfish_peer" else AWAKE)}
    return Program(WorkerSpec(name, command, cores, environment), stdin=subprocess.PIPE)


def ready(peer: Program) -> PeerReady:
    """Waits until it is loaded; EngineError, with the last line that it wrote, where it ends instead."""
    return msgspec.convert(peer.told, PeerReady)


def ask(peer: Program, way: str, question: Question) -> Generated:
    asked = msgspec.structs.replace(question, way=way)
    return msgspec.convert(peer.ask(**msgspec.to_builtins(asked)), Generated)
