"""Weights as quantized checkpoints have them: codes of few bits, and factors for groups of an output's inputs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, eq=False)
class GroupedWeight:
    """w[n, k] = value(codes[n, k]) * scales[n, k // size] + offsets[n, k // size], N outputs by K inputs."""

    codes: Tensor  # int8 or float8_e4m3fn [N, K], or of 4 bits: uint8 [N, K / 2], the first of two in the low half
    scales: Tensor  # float16 or float32 [N, groups]
    dtype: torch.dtype  # of the inputs that it multiplies
    offsets: Tensor | None = None  # as the scales
    table: Tensor | None = None  # float32 [16], the values of codes of 4 bits

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.codes), self.codes.shape[1] * (1 if self.table is None else 2)))

    @property
    def group(self) -> int:
        return self.shape[1] // self.scales.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (self.codes, self.scales, self.offsets) if part is not None)

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, outputs: slice) -> "GroupedWeight":
        offsets = None if self.offsets is None else self.offsets[outputs]
        return replace(self, codes=self.codes[outputs], scales=self.scales[outputs], offsets=offsets)

    def detach(self) -> "GroupedWeight":
        return self

    def values(self) -> Tensor:
        """Of the codes. float32 [N, K]"""
        if self.table is None:
            return self.codes.float()
        return self.table[torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(1).int()]

    def dequantized(self) -> Tensor:
        """[N, K], rounded once after the offset and once to `dtype`."""
        grouped = self.values().view(len(self), -1, self.group) * self.scales.float()[..., None]
        if self.offsets is not None:
            grouped += self.offsets.float()[..., None]
        return grouped.flatten(1).to(self.dtype)

    def widened(self, group: int) -> "GroupedWeight":
        """The same values in codes of 8 bits, in groups of `group`, which divides its own. Only of whole values."""
        codes = self.codes if self.table is None else self.values().to(torch.int8)
        repeated = partial(torch.repeat_interleave, repeats=self.group // group, dim=1)
        offsets = None if self.offsets is None else repeated(self.offsets)
        return replace(self, codes=codes, scales=repeated(self.scales), offsets=offsets, table=None)


def dense(weight: Tensor | GroupedWeight) -> Tensor:
    return weight.dequantized() if isinstance(weight, GroupedWeight) else weight


def joined(weights: Sequence[GroupedWeight]) -> GroupedWeight:
    """Outputs end to end, in codes that all their values have, and groups that divide all of theirs."""
    kinds = {(w.codes.dtype, w.group, None if w.table is None else tuple(w.table.tolist())) for w in weights}
    if len(kinds) > 1:
        weights = [w.widened(min(w.group for w in weights)) for w in weights]
    scales, offsets = torch.cat([w.scales for w in weights]), None  # of the wider type
    if any(w.offsets is not None for w in weights):
        each = [torch.zeros_like(w.scales) if w.offsets is None else w.offsets for w in weights]
        offsets = torch.cat(each).to(scales.dtype)
    return replace(weights[0], codes=torch.cat([w.codes for w in weights]), scales=scales, offsets=offsets)


class GroupedLinear(torch.nn.Linear):
    """The reference: dequantizes its weight in every call."""

    weight: GroupedWeight  # type: ignore[assignment]

    def __init__(self, weight: GroupedWeight, bias: Tensor | None = None) -> None:
        torch.nn.Module.__init__(self)
        self.out_features, self.in_features = weight.shape
        self.weight, self.bias = weight, bias  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.dequantized(), self.bias)
