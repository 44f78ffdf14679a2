"""Norms, gates and caps as kernels: each row by itself, each element wherever it lies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

#: Rows [rows, 2 n] of gates, then ups, to [rows, n].
RowOp = Callable[[torch.Tensor], torch.Tensor]
#: Whose norms multiply by their weight before they round.
_ROUND_ONCE = ("Olmo2", "Gemma2", "Gemma3", "GptOss")


def gate_op(activation: str) -> RowOp:
    """activation(gate) * up, for `features.ACTIVATIONS`."""
    ops = {"silu": torch.ops.pilotfish.gate_silu, "gelu_pytorch_tanh": torch.ops.pilotfish.gate_gelu}
    return ops[activation]


def clamped_gate_op(alpha: float, limit: float) -> RowOp:
    """The gate of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), both clamped."""
    return functools.partial(torch.ops.pilotfish.gate_clamped, alpha=alpha, limit=limit)


class FusedRMSNorm(torch.nn.Module):
    """An RMS norm in one call. With a float32 weight the op rounds once, after the product."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        kind = type(norm).__name__.removesuffix("RMSNorm")
        weight = norm.weight.detach()
        self.weight = weight.float() if kind in _ROUND_ONCE else weight
        if kind.startswith("Gemma"):
            self.weight = 1.0 + self.weight
        self.eps = float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> [..., size]."""
        return torch.ops.pilotfish.rms_norm(x, self.weight, self.eps)  # type: ignore[no-any-return]

    def of_sum(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Adds x to the residual in place, and norms that. Both [rows, size]."""
        return torch.ops.pilotfish.add_rms_norm(residual, x, self.weight, self.eps)  # type: ignore[no-any-return]


def norm_heads(norm: FusedRMSNorm, x: torch.Tensor) -> torch.Tensor:
    """Each head's norm, or one over all heads: as wide as its weight. x [rows, heads, head_dim] -> like x."""
    normed: torch.Tensor = norm(x.reshape(len(x), -1, norm.weight.numel()))
    return normed.view(x.shape)


class CappedLinear(torch.nn.Module):
    """A linear whose outputs are soft-capped: the head of Gemma 2."""

    def __init__(self, linear: torch.nn.Module, cap: float) -> None:
        super().__init__()
        self.linear, self.cap = linear, cap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N]."""
        y: torch.Tensor = self.linear(x)
        return torch.ops.pilotfish.softcap(y.view(-1, y.shape[-1]), self.cap).view_as(y)  # type: ignore[no-any-return]
