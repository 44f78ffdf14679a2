"""Recorded traffic in Mooncake's format, JSON Lines, one request a line; and what load it is."""

import gzip
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from pilotfish.errors import InputError
from pilotfish.plan.planner.demand import Demand, RequestKind

#: Tokens of a block that a trace has the hash of.
BLOCK_TOKENS = 512
#: Kinds of requests by prompt length, beside the longest request.
KINDS = 8
MINUTE = 60.0

TokenCount = Annotated[int, Meta(ge=1)]


class TimedRequest(Struct, frozen=True):
    """Equal hashes are blocks that begin with equal prefixes."""

    timestamp: Annotated[float, Meta(ge=0)]  # milliseconds
    input_length: TokenCount
    output_length: TokenCount
    hash_ids: Annotated[list[int], Meta(min_length=1)]


def read_trace(path: Path) -> list[TimedRequest]:
    """A name that ends with .gz is compressed. InputError names the first bad line."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            lines = file.read().splitlines()
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"trace: {path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not lines:
        raise InputError(f"trace: {path} has no rows; one JSON object a line is needed")
    return [_request(line, f"{path}:{i}") for i, line in enumerate(lines, 1)]


def _request(line: bytes, place: str) -> TimedRequest:
    try:
        return msgspec.json.decode(line, type=TimedRequest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        needed = ", ".join(TimedRequest.__struct_fields__)
        raise InputError(f"trace: {place} is not allowed ({error}); expected an object with {needed}") from error


class RecordedLoad(Struct, frozen=True, kw_only=True):
    requests: int
    minutes: float
    mean: float  # requests a second
    peak: float  # of the 60 seconds with most of them
    shared: float  # of prompts' tokens, those in blocks that came before, however long ago
    kinds: tuple[RequestKind, ...]

    def demand(self, rate: float) -> Demand:
        return Demand(requests=self.kinds, shared=self.shared, rate=rate)


def recorded_load(trace: Sequence[TimedRequest]) -> RecordedLoad:
    """InputError for less than a minute, which gives no rate."""
    times = sorted(one.timestamp / 1000 for one in trace)
    seconds = times[-1] - times[0]
    if seconds < MINUTE:
        raise InputError(f"trace: it takes {seconds:g} seconds; a minute or more is needed")
    busiest = max(bisect_right(times, time + MINUTE) - i for i, time in enumerate(times))
    return RecordedLoad(
        requests=len(trace),
        minutes=seconds / MINUTE,
        mean=len(trace) / seconds,
        peak=busiest / MINUTE,
        shared=_shared(trace),
        kinds=_kinds(trace),
    )


def _shared(trace: Sequence[TimedRequest]) -> float:
    seen: set[int] = set()
    found = 0
    for one in sorted(trace, key=lambda one: one.timestamp):
        known = next((i for i, block in enumerate(one.hash_ids) if block not in seen), len(one.hash_ids))
        found += min(known * BLOCK_TOKENS, one.input_length - 1)
        seen.update(one.hash_ids)
    return found / sum(one.input_length for one in trace)


def _kinds(trace: Sequence[TimedRequest]) -> tuple[RequestKind, ...]:
    """Equally many requests of each, with their means; and the longest request, which must fit too."""
    ordered = sorted(trace, key=lambda one: one.input_length + one.output_length)
    longest, rest = ordered[-1], ordered[:-1]
    edges = [len(rest) * part // KINDS for part in range(KINDS + 1)]
    groups = [rest[first:end] for first, end in pairwise(edges) if end > first]
    return (*map(_kind, groups), _kind([longest]))


def _kind(group: Sequence[TimedRequest]) -> RequestKind:
    prompt, output = (sum(getattr(one, name) for one in group) for name in ("input_length", "output_length"))
    count = len(group)
    return RequestKind(prompt=max(1, round(prompt / count)), output=max(1, round(output / count)), share=count)
