"""Where in a training row a head guesses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Places:
    """Below every token of rows of `length` or, where there are more than `anchors`, below so many that are drawn: a
    function of the step. The last guess of a chain stands for what follows the row's last token."""

    length: int
    depth: int
    anchors: int  # 0: all
    seed: int

    def of(self, rows: int, step: int) -> Tensor:
        """int64 [rows, starts], ascending."""
        everywhere = torch.arange(1, self.length - self.depth + 1)
        if not 0 < self.anchors < len(everywhere):
            return everywhere.expand(rows, -1)
        generator = torch.Generator().manual_seed((self.seed << 24) + step)
        drawn = [torch.randperm(len(everywhere), generator=generator)[: self.anchors] for _ in range(rows)]
        return everywhere[torch.stack(drawn)].sort(1).values
