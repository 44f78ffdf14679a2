"""Linear layers made of other layers' weights."""

from __future__ import annotations

import torch

from pilotfish.model.quantize import concatenated


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Linear:
    """A linear of these very tensors: weight [outputs, inputs], bias [outputs]."""
    outputs, inputs = weight.shape
    linear = torch.nn.Linear(inputs, outputs, bias is not None, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias, requires_grad=False)
    return linear


def joined(*linears: torch.nn.Linear) -> torch.nn.Linear:
    """One linear that computes all of them, outputs end to end."""
    biased = linears[0].bias is not None
    bias = torch.cat([x.bias for x in linears]) if biased else None
    return linear_of(concatenated([x.weight for x in linears]), bias)


def split_gate_up(linear: torch.nn.Linear, *, interleaved: bool = False) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    """Gate and up of a linear that computes both: one after the other, or in turns."""
    half = linear.out_features // 2
    parts = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(half), slice(half, None))
    gate, up = (linear_of(linear.weight[p], None if linear.bias is None else linear.bias[p]) for p in parts)
    return gate, up
