"""What a forward that is recorded can draw by itself, or right after it."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pilotfish.core.scheduling.executor import Sampling
from pilotfish.model.rules import SIZES, Rules
from pilotfish.model.sampling import GREEDY_SAMPLE, Filters, SampleColumns
from pilotfish.model.tables import Tables

#: Entries of one of the tables of rules.
MOST_ENTRIES = 1 << 18


@dataclass(frozen=True)
class Draws(Tables):
    table: Tensor  # int64 [COLUMNS, samples], padded
    filters: Filters
    children: int  # as in `Sampling`
    masked: bool = False  # whether `rules.bits` come later
    rows: Tensor | None = None  # int64 [samples], kept rows; None: a sample after each
    rules: Rules | None = None

    @classmethod
    def of(cls, sampling: Sampling, padded: int, vocab: int) -> "Draws | None":
        """Of a forward with `padded` kept rows. None where models have other vocabularies, without samples, and where
        rules have more than `MOST_ENTRIES`."""
        if sampling.vocabularies or not len(sampling):
            return None
        rows, samples = None, padded
        if sampling.rows is not None:
            samples = next(size for size in SIZES if size >= len(sampling))
            rows = torch.from_numpy(np.pad(sampling.rows, (0, samples - len(sampling))))
        masked = sampling.masks is not None
        rules = Rules.of(sampling, samples, vocab, lists=not masked)
        if rules is not None and max(x.shape[1] for x in rules.tensors()) > MOST_ENTRIES:
            return None
        padding = SampleColumns.table(GREEDY_SAMPLE).expand(-1, samples - len(sampling))
        table, filters = torch.cat((SampleColumns.table(sampling), padding), dim=1), Filters.of(sampling.params)
        few = Filters(True, 1, True) if any(vars(filters).values()) else filters  # so that there are few kinds of them
        return cls(table, few, sampling.children, masked, rows, rules)

    @property
    def samples(self) -> int:
        return self.table.shape[1]

    @property
    def plain(self) -> bool:
        """Whether it takes nothing but logits, parameters and noise."""
        return not self.masked and self.rows is None and self.rules is None
