"""What a forward that is recorded can draw by itself, or right after it: tables of `Sampling`, whose sizes are few."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.core.scheduling.executor import Sampling
from pilotfish.core.trees.tree import Ints
from pilotfish.model.sampling import GREEDY_SAMPLE, Filters, SampleColumns

#: Tokens that rules name, over all samples.
MOST_EDITS = 1 << 18
#: Sizes of tables of tokens and, where rows give several samples or none, of samples.
SIZES = tuple(1 << exponent for exponent in range(4, 31, 2))


@dataclass(frozen=True)
class Draws:
    table: Tensor  # int64 [COLUMNS, samples], padded
    filters: Filters
    children: int  # as in `Sampling`
    masked: bool = False  # whether `bits` come later
    rows: Tensor | None = None  # int64 [samples], kept rows; None: a sample after each
    bits: Tensor | None = None  # int32 [samples, words], of the tokens that may be drawn; None: all
    added: Tensor | None = None  # int64 [2, m], places in [samples, vocab], or -1; the bits of what is added, float64
    seen: Tensor | None = None  # int64 [2, n], places, or -1; how often tokens that penalties lower were given

    @classmethod
    def of(cls, sampling: Sampling, padded: int, vocab: int) -> Draws | None:
        """Of a forward with `padded` kept rows. None where models have other vocabularies, without samples, and of more
        than `MOST_EDITS` tokens."""
        edits = [(sample, edit) for sample, edit in enumerate(sampling.edits) if edit is not None]
        named = sum(len(edit.seen) + len(edit.biased) + len(edit.excluded) for _, edit in edits)
        if sampling.vocabularies or not len(sampling) or named > MOST_EDITS:
            return None
        rows, samples = None, padded
        if sampling.rows is not None:
            samples = next(size for size in SIZES if size >= len(sampling))
            rows = torch.from_numpy(np.pad(sampling.rows, (0, samples - len(sampling))))
        padding = SampleColumns.table(GREEDY_SAMPLE).expand(-1, samples - len(sampling))
        table, filters = torch.cat((SampleColumns.table(sampling), padding), dim=1), Filters.of(sampling.params)
        few = Filters(True, 1, True) if any(vars(filters).values()) else filters  # so that there are few kinds of them
        added = [
            *((sample, edit.biased, edit.biases) for sample, edit in edits),
            *((sample, edit.excluded, np.full(len(edit.excluded), -math.inf)) for sample, edit in edits),
        ]
        seen = [(sample, edit.seen, edit.counts) for sample, edit in edits]
        masked, lists = sampling.masks is not None, any(edit.allowed is not None for _, edit in edits)
        bits = allowed_bits(sampling, samples, vocab) if lists and not masked else None
        tables = rows, bits, _placed(added, vocab), _placed(seen, vocab)
        return cls(table, few, sampling.children, masked, *tables)

    @property
    def samples(self) -> int:
        return self.table.shape[1]

    @property
    def edits(self) -> bool:
        return self.added is not None or self.seen is not None

    @property
    def plain(self) -> bool:
        """Whether it takes nothing but logits, parameters and noise."""
        return not self.masked and self.rows is None and self.bits is None and not self.edits

    @property
    def kind(self) -> object:
        """What a recording depends on besides the sizes of `tensors`."""
        return self.filters, self.children, self.masked, *(self._given())

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self._given())

    def map(self, change: Callable[[Tensor], Tensor]) -> Draws:
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in self._given()}
        return replace(self, **changed)

    def _given(self) -> list[str]:
        return [field.name for field in fields(self) if torch.is_tensor(getattr(self, field.name))]


def allowed_bits(sampling: Sampling, samples: int, vocab: int) -> Tensor:
    """int32 [samples, words]: what masks, once they are there, and lists of tokens allow. Masks may cover a part of the
    vocabulary."""
    words = -(-vocab // 32)
    bits = np.full((samples, words), -1, np.int32)
    if sampling.masks is not None:
        masks = sampling.masks.bits()[:, :words].view(np.int32)
        bits[sampling.masks.samples] = np.pad(masks, ((0, 0), (0, words - masks.shape[1])))
    lists: dict[int, NDArray[np.int32]] = {}  # rows of one request share the very array
    for sample, edit in enumerate(sampling.edits):
        if edit is not None and edit.allowed is not None:
            if id(edit.allowed) not in lists:
                lists[id(edit.allowed)] = _packed(edit.allowed, words)
            bits[sample] &= lists[id(edit.allowed)]
    return torch.from_numpy(bits)


def _packed(tokens: Ints, words: int) -> NDArray[np.int32]:
    flags = np.zeros(32 * words, np.bool_)
    flags[tokens[tokens < len(flags)]] = True
    return np.packbits(flags, bitorder="little").view(np.int32)


def _placed(parts: Sequence[tuple[int, Ints, NDArray[Any]]], vocab: int) -> Tensor | None:
    """Of samples, their tokens and a number of 8 bytes for each. Ids beyond the vocabulary are skipped."""
    if not sum(len(tokens) for _, tokens, _ in parts):
        return None
    tokens = np.concatenate([tokens for _, tokens, _ in parts])
    samples = np.repeat([sample for sample, _, _ in parts], [len(tokens) for _, tokens, _ in parts])
    numbers = np.concatenate([numbers.view(np.int64) for _, _, numbers in parts])
    inside = tokens < vocab
    found = int(inside.sum())
    table = np.full((2, next(size for size in SIZES if size >= found)), -1, np.int64)
    table[0, :found], table[1, :found] = (samples * vocab + tokens)[inside], numbers[inside]
    return torch.from_numpy(table)
