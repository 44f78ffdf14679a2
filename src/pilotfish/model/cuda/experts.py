"""Mixtures whose products are grouped by expert, without a wait for the device. A row's bits do not depend on which
experts the other rows have chosen."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from pilotfish.model.cuda.products import BLOCK_K, FEW, STAGES
from pilotfish.model.cuda.triton_kernels.experts import expert_rows, plan_tiles
from pilotfish.model.experts import Affine, Expert, summed_choices
from pilotfish.model.kernels import Gate

PAIRS = 256  # that a program of `plan_tiles` reads at a time


class Tiles(NamedTuple):
    """Pairs of a row and a choice, by expert, in tiles of `size`."""

    order: Tensor  # int64 [pairs]
    experts: Tensor  # int64 [tiles]
    starts: Tensor  # int64 [tiles], in `order`
    ends: Tensor  # int64 [tiles]; not after its start for a tile without pairs
    size: int

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> "Tiles":
        """`chosen` int64 [pairs]"""
        pairs, size = len(chosen), 16 if len(chosen) <= 16 * experts else FEW
        order, tiles = torch.empty_like(chosen), chosen.new_zeros(3, triton.cdiv(pairs, size) + experts)
        plan_tiles[(experts,)](chosen, order, tiles, pairs, tiles.shape[1], size, PAIRS, num_warps=4)
        return cls(order, tiles[0], tiles[1], tiles[2], size)


class InvariantExperts(torch.nn.Module):
    def __init__(self, experts: Sequence[Expert], gate: Gate) -> None:
        super().__init__()
        self.gate_up = _stacked([_joined(expert.gate, expert.up) for expert in experts])
        self.down = _stacked([expert.down for expert in experts])
        self.gate = gate

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As `experts.mixed`."""
        tiles = Tiles.of(top_k_index.flatten(), len(self.gate_up.weight))
        gated = self.gate(_grouped(hidden_states, self.gate_up, tiles, top_k_index.shape[1]))
        return summed_choices(_grouped(gated, self.down, tiles, 1), top_k_weights, hidden_states.dtype)


def _joined(gate: Affine, up: Affine) -> Affine:
    bias = None if gate.bias is None or up.bias is None else torch.cat((gate.bias, up.bias))
    return Affine(torch.cat((gate.weight, up.weight)), bias)


def _stacked(affines: Sequence[Affine]) -> Affine:
    """[experts, outputs, inputs] and [experts, outputs]"""
    biases = [affine.bias for affine in affines if affine.bias is not None]
    return Affine(torch.stack([affine.weight for affine in affines]), torch.stack(biases) if biases else None)


def _grouped(x: Tensor, stacked: Affine, tiles: Tiles, choices: int) -> Tensor:
    """[pairs, outputs], of x [rows, inputs] of which each has `choices` pairs."""
    _, outputs, inputs = stacked.weight.shape
    out = x.new_empty(len(tiles.order), outputs)
    expert_rows[triton.cdiv(outputs, FEW), len(tiles.experts)](
        x.contiguous(), stacked.weight, stacked.bias, out, tiles.order, tiles.experts, tiles.starts, tiles.ends,
        outputs, inputs, choices, FEW, tiles.size, 32 if x.dtype == torch.float32 else BLOCK_K // 2,
        num_warps=4, num_stages=STAGES,
    )  # fmt: skip
    return out
