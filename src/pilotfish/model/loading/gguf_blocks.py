"""Blocks of GGUF's types as codes and factors. Layouts are ggml's (ggml-quants.c); numbers are little-endian:

Q4_0  d   | 16 bytes: codes 0 to 15 in the low halves, 16 to 31 in the high ones
Q4_1  d m | as Q4_0
Q5_0  d   | 32 fifth bits | as Q4_0                Q5_1  d m | 32 fifth bits | as Q4_0
Q8_0  d   | 32 int8
Q4_K  d dmin | 12 bytes: scales and minima of 8 groups, of 6 bits | 128 bytes: two groups in 32 bytes, low halves first
Q5_K  d dmin | 12 bytes | 32 bytes: a fifth bit of each group | as Q4_K
Q6_K  128 bytes of low halves | 64 bytes of two more bits | int8 scales of 16 groups | d
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.model.grouped import GroupedWeight

Bytes = NDArray[np.uint8]  # [blocks, bytes of each]
FOURTHS = torch.arange(16).float()


class Decoded(NamedTuple):
    codes: NDArray[np.uint8 | np.int8]  # [blocks, inputs of a block]; uint8 is of 4 bits
    scales: NDArray[np.float16 | np.float32]  # [blocks, groups of a block]
    offsets: NDArray[np.float16 | np.float32] | None = None
    first: int = 0  # what code 0 of 4 bits stands for


def _half(blocks: Bytes, at: int) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


def _halves(packed: Bytes, run: int) -> NDArray[np.uint8]:
    """[blocks, bytes] -> [blocks, codes]: the low halves of each `run` bytes, then their high halves."""
    runs = packed.reshape(len(packed), -1, 1, run)
    return np.concatenate((runs & 15, runs >> 4), axis=2).reshape(len(packed), -1)


def _bits(packed: Bytes) -> NDArray[np.uint8]:
    return np.unpackbits(packed, axis=1, bitorder="little")


def _q4_0(blocks: Bytes) -> Decoded:
    return Decoded(_halves(blocks[:, 2:], 16), _half(blocks, 0), first=-8)


def _q4_1(blocks: Bytes) -> Decoded:
    return Decoded(_halves(blocks[:, 4:], 16), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Bytes) -> Decoded:
    codes = _halves(blocks[:, 6:], 16) | _bits(blocks[:, 2:6]) << 4
    return Decoded(codes.view(np.int8) - np.int8(16), _half(blocks, 0))


def _q5_1(blocks: Bytes) -> Decoded:
    codes = _halves(blocks[:, 8:], 16) | _bits(blocks[:, 4:8]) << 4
    return Decoded(codes.view(np.int8), _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Bytes) -> Decoded:
    return Decoded(np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _half(blocks, 0))


def _k_factors(blocks: Bytes) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Scales and offsets of 8 groups: the first four have their 6 bits together, the others two of them there."""
    scales, minima, rest = (blocks[:, 4 + 4 * part : 8 + 4 * part] for part in range(3))
    by_scale = np.concatenate((scales & 63, rest & 15 | scales >> 2 & 48), axis=1).astype(np.float32)
    by_minimum = np.concatenate((minima & 63, rest >> 4 | minima >> 2 & 48), axis=1).astype(np.float32)
    d, dmin = _half(blocks, 0).astype(np.float32), _half(blocks, 2).astype(np.float32)
    return d * by_scale, -(dmin * by_minimum)


def _q4_k(blocks: Bytes) -> Decoded:
    return Decoded(_halves(blocks[:, 16:], 32), *_k_factors(blocks))


def _q5_k(blocks: Bytes) -> Decoded:
    fifths = _bits(blocks[:, 16:48]).reshape(len(blocks), 32, 8).swapaxes(1, 2).reshape(len(blocks), 256)
    return Decoded((_halves(blocks[:, 48:], 32) | fifths << 4).view(np.int8), *_k_factors(blocks))


def _q6_k(blocks: Bytes) -> Decoded:
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = _halves(blocks[:, :128], 64) | high.reshape(-1, 256) << 4
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    return Decoded(codes.view(np.int8) - np.int8(32), _half(blocks, 208).astype(np.float32) * scales)


class BlockType(NamedTuple):
    inputs: int
    size: int  # in bytes
    decode: Callable[[Bytes], Decoded]


BLOCKS = {
    "Q4_0": BlockType(32, 18, _q4_0),
    "Q4_1": BlockType(32, 20, _q4_1),
    "Q5_0": BlockType(32, 22, _q5_0),
    "Q5_1": BlockType(32, 24, _q5_1),
    "Q8_0": BlockType(32, 34, _q8_0),
    "Q4_K": BlockType(256, 144, _q4_k),
    "Q5_K": BlockType(256, 176, _q5_k),
    "Q6_K": BlockType(256, 210, _q6_k),
}


def grouped_weight(kind: str, rows: Bytes, dtype: torch.dtype) -> GroupedWeight:
    """`rows` [outputs, bytes of each] of blocks."""
    found = BLOCKS[kind].decode(rows.reshape(-1, BLOCKS[kind].size))

    def by_output(values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values).reshape(len(rows), -1))

    codes, table = found.codes, None
    if codes.dtype == np.uint8:
        codes, table = codes[:, ::2] | codes[:, 1::2] << 4, FOURTHS + found.first
    offsets = None if found.offsets is None else by_output(found.offsets)
    return GroupedWeight(by_output(codes), by_output(found.scales), dtype, offsets, table)
