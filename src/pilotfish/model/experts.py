"""Mixtures of experts whose result for a row does not depend on the other rows.

How many rows choose an expert changes from forward to forward, so an expert's products must not depend on
their row count: they are the C++ kernels' (`native_modules.py`), or library products padded to fixed row counts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from pilotfish.errors import ParameterError
from pilotfish.model.runner import library_buckets


class Mixture(torch.nn.Module):
    """Takes the place of transformers' stacked experts: each chosen expert runs once, over its rows. A row sums the
    results of its experts in the order of its own choices."""

    def __init__(self, experts: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(experts)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [rows, size], chosen experts and their weights [rows, k] -> [rows, size]."""
        rows, k = top_k_index.shape
        choices = top_k_index.flatten()
        counts = choices.bincount(minlength=len(self.experts)).tolist()
        outputs = hidden_states.new_empty(rows * k, hidden_states.shape[1])
        for expert, chosen in zip(self.experts, torch.split(choices.argsort(), counts), strict=True):
            if len(chosen):
                outputs[chosen] = expert(hidden_states[chosen // k])
        weighted = outputs.view(rows, k, -1) * top_k_weights[..., None]
        return functools.reduce(torch.add, weighted.unbind(1)).to(hidden_states.dtype)


class Router(torch.nn.Module):
    """The best `k` experts of each row and their weights: shares of the softmax over all experts (`over_all`), or the
    softmax over the chosen, which equals those shares scaled to a sum of 1."""

    def __init__(self, linear: torch.nn.Module, k: int, *, over_all: bool) -> None:
        super().__init__()
        self.linear, self.k, self.over_all = linear, k, over_all

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states [rows, size] -> logits [rows, experts], weights float32 and experts [rows, k]."""
        logits = self.linear(hidden_states)
        if self.over_all:
            weights, chosen = logits.float().softmax(dim=-1).topk(self.k, dim=-1)
        else:
            best, chosen = logits.float().topk(self.k, dim=-1)
            weights = best.softmax(dim=-1)
        return logits, weights, chosen


class LibraryExpert(torch.nn.Module):
    """The reference: transformers' operations on one of its stacked experts."""

    def __init__(self, experts: Any, index: int) -> None:
        super().__init__()
        self.gate_up, self.down = (expert_linear(experts, name, index) for name in ("gate_up_proj", "down_proj"))
        self.gate = experts._apply_gate

    def forward(self, x: Tensor) -> Tensor:
        """x [rows, size] -> [rows, size]."""
        padding = library_buckets(x.device, x.dtype).pad_rows(len(x)) - len(x)
        padded = torch.nn.functional.pad(x, (0, 0, 0, padding))
        y: Tensor = self.down(self.gate(self.gate_up(padded)))
        return y[: len(x)]


def linear_of(weight: Tensor, bias: Tensor | None) -> torch.nn.Linear:
    """A linear of these very tensors: weight [outputs, inputs], bias [outputs]."""
    outputs, inputs = weight.shape
    linear = torch.nn.Linear(inputs, outputs, bias is not None, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias, requires_grad=False)
    return linear


def split_gate_up(linear: torch.nn.Linear, *, interleaved: bool = False) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    """Gate and up of a linear that computes both: gates before ups, or in turns."""
    half = linear.out_features // 2
    parts = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(half), slice(half, None))
    gate, up = (linear_of(linear.weight[p], None if linear.bias is None else linear.bias[p]) for p in parts)
    return gate, up


def expert_linear(experts: Any, name: str, index: int) -> torch.nn.Linear:
    """The projection of a stacked expert: views, no copies."""
    weight = getattr(experts, name)[index]
    bias = getattr(experts, f"{name}_bias")[index] if experts.has_bias else None
    return linear_of(weight.T if experts.is_transposed else weight, bias)


def refuse_quantized(module: torch.nn.Module, quantization: str) -> None:
    """ParameterError for stacked experts: `quantize` changes linear layers only."""
    if any(type(child).__name__.endswith("Experts") for child in module.modules()):
        raise ParameterError("quantization", quantization, "none for a mixture of experts")


def replace_modules(module: torch.nn.Module, replacement: Callable[[Any], torch.nn.Module | None]) -> None:
    """Replace descendants of `module`, in place; where `replacement` has none the children's are looked for."""
    for name, child in list(module.named_children()):
        replaced = replacement(child)
        if replaced is None:
            replace_modules(child, replacement)
        else:
            setattr(module, name, replaced)


def library_mixture(module: Any) -> Mixture | None:
    """The mixture that takes the place of transformers' stacked experts in models without kernels; None for others."""
    if not type(module).__name__.endswith("Experts"):
        return None
    return Mixture(LibraryExpert(module, i) for i in range(len(module.gate_up_proj)))
