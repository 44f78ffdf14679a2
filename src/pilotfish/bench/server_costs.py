"""What it costs a server to follow targets and to choose among them: the engine's own code, on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS
from pilotfish.core.routing.held_prefixes import Held, RoutingKey
from pilotfish.core.routing.router import ReplicaLoad, Router, RouteRequest
from pilotfish.wire.serving import SERVER_DECODER, Identity, Status

#: Of the prompt that is routed, and what all replicas hold of it; of what each replica holds beside it.
PROMPT_KEYS, COMMON_KEYS, OWN_KEYS = 188, 8, 512
#: Keys of a Held.
CHANGES = 64
TRIALS = 5


@dataclass(frozen=True)
class FollowCosts:
    """Seconds of a server that knows so many targets."""

    decision: float  # to choose one of them
    key: float  # to apply a key that was added or removed
    report: float  # to read a Status and to tell the router
    key_bytes: float  # of a Held, for each key


def follow_costs(targets: int) -> FollowCosts:
    draw = np.random.default_rng(0)
    names = [f"target-{i}" for i in range(targets)]
    router, prompt = Router(), _keys(draw, PROMPT_KEYS)
    for name in names:
        router.held.apply(name, Held(0, prompt[:COMMON_KEYS] + _keys(draw, OWN_KEYS), whole=True))
        router.told(name, ReplicaLoad(int(draw.integers(1 << 16)), int(draw.integers(1 << 20)), 0, 24))
    router.held.apply(names[0], Held(1, prompt))
    request = RouteRequest(PROMPT_KEYS * OBJECT_TOKENS, prompt, "session")
    decision = _seconds(lambda: router.undo(router.choose(request, names)), 20)
    changes = [Held(i + 2, _keys(draw, CHANGES)) for i in range(40)]
    texts = [msgspec.msgpack.encode(held) for held in changes]
    applied = iter(texts)
    key = _seconds(lambda: router.held.apply(names[0], _held(next(applied))), len(texts) // TRIALS) / CHANGES
    status = msgspec.msgpack.encode(_status())
    report = _seconds(lambda: _report(router, names[0], status), 200)
    return FollowCosts(decision, key, report, statistics.mean(map(len, texts)) / CHANGES)


def _keys(draw: np.random.Generator, count: int) -> list[RoutingKey]:
    return [draw.bytes(8) for _ in range(count)]


def _held(text: bytes) -> Held:
    held = SERVER_DECODER.decode(text)
    assert isinstance(held, Held)
    return held


def _status() -> Status:
    identity = Identity("target", "async", "bfloat16", 131072, 128256, 1 << 20, 1 << 17, 64, 16)
    return Status(
        identity, running=40, waiting=3, free_slots=1 << 19, preemptions=0, incarnation="1", pending_tokens=12_345
    )


def _report(router: Router, name: str, text: bytes) -> None:
    status = SERVER_DECODER.decode(text)
    assert isinstance(status, Status)
    router.told(name, status.load)


def _seconds(call: Callable[[], object], count: int) -> float:
    """Of a call: the median of some means."""
    return statistics.median(_mean_seconds(call, count) for _ in range(TRIALS))


def _mean_seconds(call: Callable[[], object], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count
