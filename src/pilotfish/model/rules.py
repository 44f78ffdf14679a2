"""Rules on logits (`core.sampling.logit_rules`) as tables of few sizes. What excludes a token makes it -inf, which no
other rule changes, so that only a token's bias and penalties have an order."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.core.sampling.logit_rules import LogitEdits
from pilotfish.core.scheduling.executor import Sampling, TokenMasks
from pilotfish.core.trees.tree import Ints
from pilotfish.model.tables import Tables

SIZES = tuple(1 << exponent for exponent in range(4, 31, 2))
#: The first row of penalties in `SampleColumns.table`.
PENALTIES = 3
Edits = Sequence[tuple[int, LogitEdits]]


@dataclass(frozen=True)
class Rules(Tables):
    """int64 but for `bits`. A *place* is one in [samples, vocab], or -1."""

    bits: Tensor | None = None  # int32 [samples, words], of the tokens that may be drawn; None: all
    added: Tensor | None = None  # [2, m]: places; the bits of what is added, float64, of a place once finite at most
    seen: Tensor | None = None  # [2, n], as all below where there are penalties: tokens of histories, one after
    #                             another, and how often each was given
    spans: Tensor | None = None  # [2, samples]: where in `seen` a sample's history begins and ends
    paths: Tensor | None = None  # [samples, depth]: tokens after its history, or -1
    fresh: Tensor | None = None  # [2, k]: places of those that the history has not, and how often they are there
    longest: int = 0  # of the histories, or more

    @classmethod
    def of(cls, sampling: Sampling, samples: int, vocab: int, *, lists: bool = True) -> "Rules | None":
        """Of samples, padded to `samples`. None if none has any; `lists` of allowed tokens may be left to others. Ids
        beyond the vocabulary are skipped, as a draft's may be smaller."""
        edits = [(sample, edit) for sample, edit in enumerate(sampling.edits) if edit is not None]
        listed = lists and any(edit.allowed is not None for _, edit in edits)
        bits = allowed_bits(None, sampling.edits, samples, vocab) if listed else None
        biased = ((sample, edit.biased, edit.biases) for sample, edit in edits)
        excluded = ((sample, edit.excluded, np.full(len(edit.excluded), -math.inf)) for sample, edit in edits)
        rules = cls(bits, _placed([*biased, *excluded], vocab))._with_seen(edits, samples, vocab)
        return rules if rules.tensors() else None

    def _with_seen(self, edits: Edits, samples: int, vocab: int) -> "Rules":
        histories = {id(edit.seen): edit.seen for _, edit in edits if edit.seen is not None}  # of rows of one request
        if not histories:
            return self
        lengths = [len(one.tokens) for one in histories.values()]
        begins, longest = dict(zip(histories, np.cumsum([0, *lengths]), strict=False)), _size(max(lengths))
        spans, depth = np.zeros((2, samples), np.int64), _size(max(len(edit.path) for _, edit in edits))
        paths, new = np.full((samples, depth), -1, np.int64), list[tuple[int, Ints, Ints]]()
        for sample, edit in edits:
            if edit.seen is not None:
                begin, times = begins[id(edit.seen)], edit.seen.new(edit.path)
                spans[:, sample] = begin, begin + len(edit.seen.tokens)
                paths[sample, : len(edit.path)] = edit.path
                new.append((sample, np.array([*times], np.int64), np.array([*times.values()], np.int64)))
        seen = np.zeros((2, _size(sum(lengths))), np.int64)
        seen[:, : sum(lengths)] = np.hstack([(one.tokens, one.counts) for one in histories.values()])
        of_samples = torch.from_numpy(spans), torch.from_numpy(paths), _placed(new, vocab)
        return Rules(self.bits, self.added, torch.from_numpy(seen), *of_samples, longest)

    def applied(self, logits: Tensor, table: Tensor) -> Tensor:
        """The reference: float64 [samples, vocab], of logits likewise; `table` of `SampleColumns`."""
        scores, vocab = logits.to(torch.float64, copy=True), logits.shape[1]
        if self.bits is not None:
            scores.masked_fill_(~unpacked(self.bits, vocab), -torch.inf)
        flat = scores.view(-1)
        if self.added is not None:
            places, added = self.added[:, self.added[0] >= 0]
            flat.index_add_(0, places, added.view(torch.float64))
        if self.seen is not None:
            places, counts = self._counted(vocab)
            penalties = table[PENALTIES : PENALTIES + 3].view(torch.float64)
            repetition, presence, frequency = penalties[:, places // vocab]
            score = flat[places]
            lowered = torch.where(score > 0, score / repetition, score * repetition)
            flat[places] = lowered - (counts * frequency + (counts > 0) * presence)
        return scores

    def _counted(self, vocab: int) -> Tensor:
        """[2, n]: places of all tokens that are lowered, and how often each was given."""
        assert self.seen is not None and self.spans is not None and self.paths is not None
        begins, ends = self.spans
        each = torch.arange(len(begins), device=begins.device).repeat_interleave(ends - begins)
        before = (ends - begins).cumsum(0) - ends  # of a sample's first entry, less where its history begins
        tokens, counts = self.seen[:, torch.arange(len(each), device=each.device) - before[each]]
        counts = counts + sum(column[each] == tokens for column in self.paths.T[self.paths.amax(dim=0) >= 0])
        found = torch.stack((each * vocab + tokens, counts))[:, tokens < vocab]
        return found if self.fresh is None else torch.cat((found, self.fresh[:, self.fresh[0] >= 0]), dim=1)

    @property
    def edits(self) -> bool:
        """Whether scores change, which takes float64."""
        return self.added is not None or self.seen is not None


def allowed_bits(masks: TokenMasks | None, edits: Iterable[LogitEdits | None], samples: int, vocab: int) -> Tensor:
    """int32 [samples, words]: what masks, which may cover a part of the vocabulary, and lists of tokens allow."""
    words = -(-vocab // 32)
    bits, lists = np.full((samples, words), -1, np.int32), dict[int, NDArray[np.int32]]()
    if masks is not None:
        known = masks.bits()[:, :words].view(np.int32)
        bits[masks.samples] = np.pad(known, ((0, 0), (0, words - known.shape[1])))
    for sample, edit in enumerate(edits):
        if edit is not None and edit.allowed is not None:  # rows of one request share the very array
            if id(edit.allowed) not in lists:
                flags = np.bincount(edit.allowed[edit.allowed < 32 * words], minlength=32 * words) > 0
                lists[id(edit.allowed)] = np.packbits(flags, bitorder="little").view(np.int32)
            bits[sample] &= lists[id(edit.allowed)]
    return torch.from_numpy(bits)


def unpacked(bits: Tensor, vocab: int) -> Tensor:
    """bool [samples, vocab]; False where there are no bits."""
    flags = np.unpackbits(bits.cpu().numpy().view(np.uint8), axis=1, count=vocab, bitorder="little")
    return torch.from_numpy(flags.view(np.bool_)).to(bits.device)


def _placed(parts: Sequence[tuple[int, Ints, NDArray[Any]]], vocab: int) -> Tensor | None:
    """[2, n]: places of samples' tokens, and a number of 8 bytes for each."""
    if not sum(len(tokens) for _, tokens, _ in parts):
        return None
    tokens = np.concatenate([tokens for _, tokens, _ in parts])
    samples = np.repeat([sample for sample, _, _ in parts], [len(tokens) for _, tokens, _ in parts])
    numbers = np.concatenate([numbers.view(np.int64) for _, _, numbers in parts])
    inside = tokens < vocab
    table = np.full((2, _size(int(inside.sum()))), -1, np.int64)
    table[:, : inside.sum()] = (samples * vocab + tokens)[inside], numbers[inside]
    return torch.from_numpy(table)


def _size(count: int) -> int:
    return next(size for size in SIZES if size >= count)
