"""Frames that nearly are messages, by their bytes or by what they say."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from pilotfish.core.drafting.messages import ToDraft, ToTarget
from pilotfish.wire.channel import encode
from pilotfish.wire.conformance.faults import mutated

#: What fields are changed to.
ODD: Sequence[Any] = (
    *(0, 1, 2, 3, -1, 7, 255, 4096, (1 << 31) - 1, 1 << 31, (1 << 53) - 1, 1 << 53, (1 << 64) - 1),
    *(0.0, -1.0, 0.5, 1e308, float("inf"), float("nan"), None, True, "", "x", "x" * 2000, b"", b"x" * 16, b"x" * 32),
    *([], [0], [1, 2, 3], [3, 1, 2], [[1]], ["x"], [1] * 300, {}, {"x": 1}, {1: 0.5}),
)
PAGE = 4096


def mutant(draw: Random, message: ToDraft | ToTarget) -> bytes:
    if draw.random() < 0.5:
        return mutated(draw, encode(message))
    fields = msgspec.to_builtins(message, builtin_types=(bytes,))
    for _ in range(1 + draw.randrange(2)):
        _change(draw, fields)
    return encode(fields)


def _change(draw: Random, fields: dict[str, Any]) -> None:
    """One field, or one entry of a field."""
    name = draw.choice(sorted(fields))
    value, odd = fields[name], draw.choice(ODD)
    if isinstance(value, list) and value and draw.random() < 0.5:
        fields[name] = [*value]
        fields[name][draw.randrange(len(value))] = odd
    elif isinstance(value, dict) and value and draw.random() < 0.5:
        fields[name] = {**value, draw.choice(sorted(value)): odd}
    elif isinstance(value, int) and value < 1 << 62 and draw.random() < 0.5:
        fields[name] = value + draw.choice((-1, 1, 2, 10))
    else:
        fields[name] = odd


def resident_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
