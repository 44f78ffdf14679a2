"""Which tokens each training step sees: a function of seed and step, so that a resumed run continues exactly.

The text is cut into windows; every epoch shifts the cut and shuffles the windows. In a share of the
rows the positions jump once, so that attention learns distances up to the context length:

    token      t0  t1  t2  t3  t4  t5        cut = 3, jump = 900
    position    0   1   2 903 904 905
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pilotfish.train.corpus import Tokens

JUMPING_SHARE = 0.25


@dataclass(frozen=True)
class Batch:
    """`tokens` [rows, length + 1]: inputs and, one further, targets; `positions` [rows, length]."""

    tokens: Tensor
    positions: Tensor

    @property
    def inputs(self) -> Tensor:
        return self.tokens[:, :-1]

    @property
    def targets(self) -> Tensor:
        return self.tokens[:, 1:]


@dataclass(frozen=True)
class Windows:
    """Batches of `rows` windows of `length` tokens from a token row [tokens]."""

    tokens: Tokens
    rows: int
    length: int
    context: int
    seed: int

    def batch(self, step: int, device: torch.device) -> Batch:
        """The batch of one step."""
        starts = [self._start(step * self.rows + row) for row in range(self.rows)]
        windows = np.stack([self.tokens[start : start + self.length + 1] for start in starts])
        tokens = torch.from_numpy(windows.astype(np.int64))
        return Batch(tokens.to(device), self._positions(step).to(device))

    def _start(self, index: int) -> int:
        """Where the index-th window of the whole run starts."""
        epoch, place = divmod(index, self._per_epoch)
        generator = np.random.default_rng((self.seed, 0, epoch))
        shift = int(generator.integers(self.length))
        return shift + self.length * int(generator.permutation(self._per_epoch)[place])

    @property
    def _per_epoch(self) -> int:
        """Windows per epoch, whatever the shift: the last one still has its target token."""
        return (len(self.tokens) - self.length) // self.length

    def _positions(self, step: int) -> Tensor:
        generator = np.random.default_rng((self.seed, 1, step))
        jumping = generator.random((self.rows, 1)) < JUMPING_SHARE
        cut = generator.integers(1, self.length, (self.rows, 1))
        jump = generator.integers(self.context - self.length + 1, size=(self.rows, 1))
        place = np.arange(self.length)
        return torch.from_numpy(place + jumping * jump * (place >= cut))
