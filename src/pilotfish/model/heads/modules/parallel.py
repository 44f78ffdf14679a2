"""The modules of parallel heads (Medusa), each over the same feature."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from pilotfish.model.heads.modules.parts import Parts
from pilotfish.model.heads.spec import ParallelHead


class DepthLogits(torch.nn.Module):
    """Logits of the tokens at one depth."""

    def __init__(self, head: ParallelHead, parts: Parts, index: int, words: Tensor | slice) -> None:
        """`words`: rows of its `lm_head` that are used."""
        super().__init__()
        self.blocks = [parts.product(parts.affine(f"heads.{index}.blocks.{j}")) for j in range(head.blocks)]
        self.lm_head = parts.product(parts.affine(f"heads.{index}.lm_head", words))

    def forward(self, x: Tensor) -> Tensor:
        """x [rows, hidden] -> float32 [rows, draft vocab]"""
        for block in self.blocks:  # in float64: vectors and what is left of a row have other last bits
            x = x + F.silu(block(x).double()).to(x.dtype)
        logits: Tensor = self.lm_head(x)
        return logits.float()
