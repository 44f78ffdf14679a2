"""A target's features for a trained head: a vector of its hidden states for each committed token.

position        0    1    2    3    4
token           a    b    c    d    e        e: the last committed one, the root
feature         A    B    C    D    -        the target has not run e yet
row of a head        A b  B c  C d  D e      the feature of the token before, and the token

A head beside its target reads features where they are: "feature" in its rows is then [1 + the slot], or [0] for zeros.
Others get them as bytes: rows of little-endian numbers, one after the other.

    float32    as they are
    bfloat16   the upper half of a float32, rounded to even
    fp8        e4m3 (sign, 4 bits of exponent with bias 7, 3 of mantissa, no infinity), times the row's scale
    int8       times the row's scale

A scale is a float32: the row's largest number over the largest of the type. A row with a number that is not finite
counts as unknown.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from pilotfish.core.cache.slots import Slots
from pilotfish.errors import ParameterError, WireError

FINAL = -1  # in place of a layer's id: the hidden state after the last layer and the final norm
Features: TypeAlias = NDArray[np.float32]  # [tokens, width]; a row of NaN where it is not known
#: Reads features of tokens in slots of a target, which keep them as they keep KV: [slots, width].
FeatureSource: TypeAlias = Callable[[Slots], Features]


class FeatureLog:
    """One sequence's features on their way to the rows that need them, in order. A lost one's row goes without."""

    def __init__(self, width: int) -> None:
        self._none = np.full(width, np.nan, np.float32)
        self._rows: dict[int, NDArray[np.float32]] = {}  # by position, from `_first` on
        self._first = 0
        self._gap: int | None = None  # the first position whose feature a row went without
        self.reach = 0  # positions up to the last one whose feature came

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, first: int, rows: Features) -> None:
        skipped = max(self._first - first, 0)
        for position, row in enumerate(rows[skipped:], first + skipped):
            self._rows[position] = row.copy()  # without the others that came with it
        if len(rows) > skipped:
            self.reach = max(self.reach, first + len(rows))

    def of_rows(self, start: int, count: int) -> Features:
        """For the rows of tokens [start, start + count): the feature before each."""
        found = [self._rows.get(position, self._none) for position in range(start - 1, start - 1 + count)]
        return np.stack(found) if found else np.zeros((0, len(self._none)), np.float32)

    def forget(self, before: int) -> None:
        first = max(before - 1, self._first)
        for position in range(self._first, first):
            if self._rows.pop(position, None) is None and self._gap is None:
                self._gap = position
        self._first, self.reach = first, max(self.reach, first)

    def num_whole(self, count: int) -> int:
        """How many of the first `count` tokens, whose rows are computed, come before the first lost feature."""
        return count if self._gap is None else min(count, self._gap + 1)

    def restart(self, first: int) -> None:
        self._rows, self._first, self.reach = {}, first, first
        if self._gap is not None and self._gap >= first:
            self._gap = None


FeatureType: TypeAlias = Literal["float32", "bfloat16", "fp8", "int8"]
FEATURE_TYPES: tuple[FeatureType, ...] = get_args(FeatureType)
#: Bytes of a number.
ITEM_BYTES: dict[FeatureType, int] = {"float32": 4, "bfloat16": 2, "fp8": 1, "int8": 1}
LARGEST: dict[FeatureType, float] = {"fp8": 448.0, "int8": 127.0}  # of the types that have a scale

AT_A_TIME = 1 << 16  # numbers that are rounded at a time

Bytes: TypeAlias = NDArray[np.uint8]


def feature_type(name: str) -> FeatureType:
    for kind in FEATURE_TYPES:
        if kind == name:
            return kind
    raise ParameterError("feature_dtype", name, f"one of {', '.join(FEATURE_TYPES)}")


@dataclass(frozen=True)
class CodedRows:
    rows: Bytes  # [n, bytes of a row]
    scales: Bytes  # [n, 4], or [n, 0] for a type without

    def span(self, first: int, end: int) -> "CodedRows":
        return CodedRows(self.rows[first:end], self.scales[first:end])


def coded(features: Features, kind: FeatureType) -> CodedRows:
    """Some rows at a time, so that intermediate values stay in the processor's caches."""
    values = np.ascontiguousarray(features, "<f4")
    some = max(AT_A_TIME // max(values.shape[1], 1), 1)
    parts = [_coded(values[first : first + some], kind) for first in range(0, max(len(values), 1), some)]
    rows, scales = (np.concatenate(columns) for columns in zip(*((p.rows, p.scales) for p in parts), strict=True))
    return CodedRows(rows, scales)


def _coded(values: NDArray[np.float32], kind: FeatureType) -> CodedRows:
    if kind in LARGEST:
        scales = _scales(values, kind)
        with np.errstate(invalid="ignore"):
            scaled = np.divide(values, scales, dtype=np.float32)
            rows = _fp8(scaled) if kind == "fp8" else np.rint(scaled).astype(np.int8)
        return CodedRows(rows.view(np.uint8), scales.view(np.uint8))
    plain = values if kind == "float32" else _bfloat16(values)
    return CodedRows(plain.view(np.uint8), np.zeros((len(values), 0), np.uint8))


def decoded_rows(rows: bytes, scales: bytes, kind: FeatureType, width: int) -> Features:
    """WireError where the bytes are not whole rows and their scales."""
    size = width * ITEM_BYTES[kind]
    count = len(rows) // size
    if not count or count * size != len(rows):
        raise WireError(f"features: {len(rows)} bytes are no rows of {width} numbers of type {kind}")
    if len(scales) != (4 * count if kind in LARGEST else 0):
        raise WireError(f"features: {len(scales)} bytes of scales for {count} rows of type {kind}")
    values = _numbers(rows, kind).reshape(count, width)
    if kind in LARGEST:
        with np.errstate(over="ignore", invalid="ignore"):
            values = values * np.frombuffer(scales, "<f4")[:, None]
    known = np.logical_and.reduce(np.isfinite(values), axis=1)
    return values if known.all() else np.where(known[:, None], values, np.float32(np.nan))


def _numbers(rows: bytes, kind: FeatureType) -> NDArray[np.float32]:
    if kind == "float32":
        return np.frombuffer(rows, "<f4").astype(np.float32)
    if kind == "bfloat16":
        return (np.frombuffer(rows, "<u2").astype(np.uint32) << 16).view(np.float32)
    if kind == "fp8":
        return _FP8[np.frombuffer(rows, np.uint8)]
    return np.frombuffer(rows, np.int8).astype(np.float32)


def _scales(values: NDArray[np.float32], kind: FeatureType) -> NDArray[np.float32]:
    """[n, 1]; NaN for an unknown row."""
    largest = np.abs(values).max(axis=1, keepdims=True, initial=0.0)
    scales: NDArray[np.float32] = np.maximum(largest / np.float32(LARGEST[kind]), np.finfo(np.float32).tiny)
    scales[~np.isfinite(largest)] = np.nan
    return scales


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    halves: NDArray[np.uint16] = rounded.astype("<u2")
    halves[np.isnan(values)] = 0x7FC0
    return halves


def _fp8(values: NDArray[np.float32]) -> Bytes:
    """Of numbers of at most 448, rounded to even."""
    bits = values.view(np.uint32)
    signs, sizes = (bits >> 31).astype(np.uint8) << 7, bits & np.uint32(0x7FFFFFFF)
    codes = ((sizes + 0x7FFFF + (sizes >> 20 & 1)) >> 20).astype(np.int16) - (120 << 3)  # exponents count from 7
    small = sizes < 121 << 23
    codes[small] = np.rint(np.abs(values[small]) * 512)  # multiples of 2 ** -9; 8 of them are the first normal number
    rounded: Bytes = np.bitwise_or(codes.astype(np.uint8), signs, dtype=np.uint8)
    return rounded


def _fp8_values() -> NDArray[np.float32]:
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    sizes = np.where(exponents, np.ldexp(1 + mantissas / 8, exponents - 7), np.ldexp(mantissas / 8, -6))
    sizes[(codes & 0x7F) == 0x7F] = np.nan
    return np.where(codes & 0x80, -sizes, sizes).astype(np.float32)


_FP8 = _fp8_values()
