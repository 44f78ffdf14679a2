import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from pilotfish.core.features.features import Features
from pilotfish.core.scheduling.executor import ANY_DEPTH, NO_SAMPLING, ForwardSeconds, Outcome, Sampling, SequenceRows
from pilotfish.errors import ParameterError
from pilotfish.model.batch import Buckets, Forwarded
from pilotfish.model.devices import kernels_of
from pilotfish.model.draws import Draws
from pilotfish.model.kernels import Kernels
from pilotfish.model.sampling import Drawn, drawn

#: Whole numbers that float32 tells apart.
MOST_SLOTS = 1 << 24


@dataclass(frozen=True)
class HeadSetup:
    device: torch.device
    dtype: torch.dtype  # of weights, states and KV
    num_slots: int
    eager: bool  # in plain torch
    vocab_size: int | None = None  # tokens from there on are never given

    def kernels(self, head_dim: int = 0) -> Kernels:
        return kernels_of(self.device, head_dim, eager=self.eager)


@dataclass(frozen=True)
class DraftVocab:
    target_size: int  # tokens that it reads
    size: int
    words: Tensor | slice  # `size` rows of its `lm_head`, so that the target's ids ascend
    ids: Tensor | None  # int64 [size], the target's ids of them; None: the first ones

    @classmethod
    def of(cls, draft_size: int, d2t: Tensor | None, target_size: int, setup: HeadSetup) -> "DraftVocab":
        most = target_size if setup.vocab_size is None else min(target_size, setup.vocab_size)
        if d2t is None:
            size = min(draft_size, most)
            return cls(target_size, size, slice(0, size), None)
        words = d2t.argsort()
        words = words[d2t[words] < most]
        return cls(target_size, len(words), words, d2t[words].to(setup.device))


@dataclass(frozen=True)
class HeadLogits:
    values: Tensor  # float32 [kept rows, draft vocab], raw
    confidences: Tensor | None = None  # float64 [kept rows], log-chance that any child of a row is accepted; None: 0
    forwarded: Forwarded | None = None  # that may have drawn from them


class HeadExecutor(ABC):
    """A head's row of token i takes the feature of token i - 1 and stands at its position: a first token has no row and
    is never kept. Pacing is done around `execute`."""

    deepest = ANY_DEPTH

    def __init__(self, feature_width: int, setup: HeadSetup, context: int, vocab: DraftVocab, buckets: Buckets) -> None:
        self.feature_width = feature_width
        self.num_slots, self.context = setup.num_slots, context
        self.vocab, self.vocab_size, self.buckets = vocab, vocab.target_size, buckets
        self._device, self._kernels = setup.device, setup.kernels()
        self._plane: Tensor | None = None

    def read_from(self, plane: Tensor) -> None:
        """Features are rows of `plane` [slots, width], on this device: rows of sequences name their slots.
        ParameterError for more slots than float32 counts."""
        if len(plane) > MOST_SLOTS:
            allowed = f"up to {MOST_SLOTS - 1} with a trained head in mode sync"
            raise ParameterError("kv_slots", len(plane) - 1, allowed)
        self._plane, self.feature_width = plane, 1

    def feature_values(self, features: Tensor) -> Tensor:
        """Features of rows [rows, feature_width] on the device, [rows, width]. Of the plane's rows those that are not
        finite are zeros."""
        features = features.to(self._device)
        if self._plane is None:
            return features
        places = features.nan_to_num(nan=0.0).long()
        rows = self._plane.index_select(0, (places[:, 0] - 1).clamp(min=0))
        return rows.masked_fill((places == 0) | ~rows.isfinite().all(dim=1, keepdim=True), 0.0)

    def padded(self, rows: int) -> int:
        return self.buckets.pad_rows(rows)

    def execute(self, rows: Sequence[SequenceRows], sampling: Sampling) -> Outcome:
        began, kernels = time.perf_counter(), self._kernels
        if sampling.masks is not None:
            sampling.masks.begin()
        start, logits, end = kernels.moment(), self.forward(rows, sampling), kernels.moment()
        told = None if logits.forwarded is None else logits.forwarded.told(sampling, self.vocab.size)
        found = None if told is None else Drawn.read(told, sampling)
        if found is not None and found.broken:
            logits, found = self.forward(rows), None  # with the confidences that were told with chances
        if found is None:
            found = drawn(logits.values, sampling, ids=self.vocab.ids)
        tokens, chances, broken = found
        if logits.confidences is not None and chances is not None:
            confidences = logits.confidences.cpu().numpy()
            chances = chances + (confidences if sampling.rows is None else confidences[sampling.rows])[:, None]
        kernels.wait(end)
        model = kernels.seconds(end, start)
        sampled = max(time.perf_counter() - began - model, 0.0)
        return Outcome(tokens, chances, broken, seconds=ForwardSeconds(model=model, sample=sampled))

    @torch.inference_mode()
    def forward(self, rows: Sequence[SequenceRows], sampling: Sampling = NO_SAMPLING) -> HeadLogits:
        following = [part for part in map(without_first, rows) if part.num_rows]
        return self.run(following, sampling) if following else HeadLogits(torch.zeros(0, self.vocab.size))

    def draws(self, sampling: Sampling, padded: int) -> Draws | None:
        """What a recording of `padded` kept rows draws."""
        draws = Draws.of(sampling, padded, self.vocab.size)
        of_target = draws is None or self.vocab.ids is None or (draws.plain and draws.children)
        return draws if of_target else None  # masks and rules name the target's tokens

    @abstractmethod
    def run(self, rows: Sequence[SequenceRows], sampling: Sampling) -> HeadLogits:
        """`rows` of sequences `without_first`: at least one, each with at least one row. A recording may draw by
        `sampling` at once."""


def without_first(rows: SequenceRows) -> SequenceRows:
    slots = rows.prefix_slots[1:]
    if rows.start > 0:
        return structs.replace(rows, start=rows.start - 1, prefix_slots=slots)
    kept = [offset - 1 for offset in rows.kept]
    features = None if rows.features is None else rows.features[1:]
    return SequenceRows(0, rows.tokens[1:], slots, rows.nodes, kept, features)


def filled(rows: SequenceRows, width: int) -> tuple[Features, int]:
    """Its features; unknown (not finite) ones are as the last known before, else zeros; counts the rows of zeros."""
    features = np.full((len(rows.tokens), width), np.nan, np.float32) if rows.features is None else rows.features
    known = np.isfinite(features).all(axis=1)
    if known.all():
        return features, 0
    last = np.maximum.accumulate(np.where(known, np.arange(len(features)), -1))
    unknown = int((last < 0).sum())
    return np.where(last[:, None] < 0, np.float32(0.0), features[last]), unknown
