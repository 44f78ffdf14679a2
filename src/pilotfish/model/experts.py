"""Mixtures of experts whose result for a row does not depend on the other rows. The number of rows of an expert varies,
so its products are the kernels' (`fused.py`), or padded to fixed row counts."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.integrations.moe import ExpertsInterface

from pilotfish.model.batch import library_buckets


class Affine(NamedTuple):
    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None  # [outputs]


class Expert(NamedTuple):
    gate: Affine
    up: Affine
    down: Affine


def mixed(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Runs each chosen expert (module or function) once, over its rows; a row sums results in the order of its choices.
    hidden_states [rows, size], experts and their weights [rows, k] -> [rows, size]."""
    rows, k = top_k_index.shape
    choices = top_k_index.flatten()
    counts = choices.bincount(minlength=len(experts)).tolist()
    outputs = hidden_states.new_empty(rows * k, hidden_states.shape[1])
    for expert, chosen in zip(experts, torch.split(choices.argsort(), counts), strict=True):
        if len(chosen):
            outputs[chosen] = expert(hidden_states[chosen // k])
    return summed_choices(outputs, top_k_weights, hidden_states.dtype)


def summed_choices(outputs: Tensor, top_k_weights: Tensor, dtype: torch.dtype) -> Tensor:
    """outputs [rows * k, size] -> [rows, size]"""
    weighted = outputs.view(*top_k_weights.shape, -1) * top_k_weights[..., None]
    return functools.reduce(torch.add, weighted.unbind(1)).to(dtype)


def library_mixture(experts: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The reference: transformers' operations on its stacked experts."""

    def run(index: int, x: Tensor) -> Tensor:
        padding = library_buckets(x.device).pad_rows(len(x)) - len(x)
        gate_up, down = expert_parts(experts, index)
        gated = experts._apply_gate(F.linear(F.pad(x, (0, 0, 0, padding)), *gate_up))
        return F.linear(gated, *down)[: len(x)]

    each = [functools.partial(run, index) for index in range(experts.num_experts)]
    return mixed(each, hidden_states, top_k_index, top_k_weights)


ExpertsInterface.register("pilotfish", library_mixture)


class Mixture(torch.nn.ModuleList):
    forward = mixed


class ExpertRouter(torch.nn.Module):
    """Experts are weighted by the softmax over all of them (`over_all`) or over the chosen."""

    def __init__(self, linear: torch.nn.Module, k: int, *, over_all: bool) -> None:
        super().__init__()
        self.linear, self.k, self.over_all = linear, k, over_all

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.linear(hidden_states)
        if self.over_all:
            weights, chosen = logits.float().softmax(dim=-1).topk(self.k, dim=-1)
        else:
            best, chosen = logits.float().topk(self.k, dim=-1)
            weights = best.softmax(dim=-1)
        return logits, weights, chosen


def sigmoid(x: Tensor) -> Tensor:
    """A softmax goes row by row. torch's own sigmoid gives an element other bits among the last of a batch."""
    return torch.stack((x, torch.zeros_like(x)), dim=-1).softmax(dim=-1)[..., 0]


class SigmoidRouter(torch.nn.Module):
    """Experts are weighted by sigmoids of their own, and chosen by these plus a `correction`, within the groups whose
    two best experts are best."""

    def __init__(self, router: Any, weight: Tensor, correction: Tensor | float = 0.0) -> None:
        super().__init__()
        self.dtype, (outputs, inputs) = weight.dtype, weight.shape
        self.linear = torch.nn.Linear(inputs, outputs, bias=False, device="meta")
        self.linear.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
        self.correction, self.k = correction, router.top_k
        self.groups, self.kept = getattr(router, "num_group", 1), getattr(router, "topk_group", 1)
        self.scale, self.normed = getattr(router, "routed_scaling_factor", 1.0), getattr(router, "norm_topk_prob", True)

    def forward(self, hidden_states: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.linear(hidden_states.flatten(0, -2).to(self.dtype)).float()
        scores = sigmoid(logits)
        ranks = self._in_groups(scores + (self.correction if correction is None else correction))
        chosen = ranks.topk(self.k, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.normed:
            weights = weights / (functools.reduce(torch.add, weights.unbind(1))[:, None] + 1e-20)
        return logits, weights * self.scale, chosen

    def _in_groups(self, ranks: Tensor) -> Tensor:
        """-inf for experts of other groups."""
        if self.groups == self.kept:
            return ranks
        grouped = ranks.view(len(ranks), self.groups, -1)
        best, second = grouped.topk(2, dim=-1).values.unbind(-1)
        left_out = torch.ones_like(best, dtype=torch.bool)
        left_out.scatter_(1, (best + second).topk(self.kept, dim=-1).indices, value=False)
        return grouped.masked_fill(left_out[..., None], -torch.inf).flatten(1)


class GatedSharedMixture(torch.nn.Module):
    """Of Qwen2-MoE: beside the chosen experts one of all rows, weighted by a sigmoid."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.gate, self.experts = block.gate, block.experts
        self.shared_expert, self.shared_expert_gate = block.shared_expert, block.shared_expert_gate

    def forward(self, hidden_states: Tensor) -> Tensor:
        rows = hidden_states.flatten(0, -2)
        _, weights, chosen = self.gate(rows)
        shared = sigmoid(self.shared_expert_gate(rows)) * self.shared_expert(rows)
        mixed: Tensor = self.experts(rows, chosen, weights) + shared
        return mixed.view_as(hidden_states)


def without_torch_sigmoids(module: Any) -> torch.nn.Module | None:
    """What replaces a module of a mixture that has some. Its linear layers are still torch's."""
    if hasattr(module, "shared_expert_gate"):
        return GatedSharedMixture(module)
    if type(module).__name__ == "MiniMaxM2TopKRouter":  # its block has the correction
        return SigmoidRouter(module, module.weight)
    if type(module).__name__.endswith("TopkRouter") and hasattr(module, "e_score_correction_bias"):
        return SigmoidRouter(module, module.weight.float(), module.e_score_correction_bias.clone())
    return None


def stacked_experts(module: torch.nn.Module) -> list[Any]:
    """transformers' modules of all experts of a layer."""
    return [part for part in module.modules() if type(part).__name__.endswith("Experts")]


def expert_parts(experts: Any, index: int) -> tuple[Affine, Affine]:

    def part(name: str) -> Affine:
        weight = getattr(experts, name)[index]
        bias = getattr(experts, f"{name}_bias")[index] if experts.has_bias else None
        return Affine(weight.T if experts.is_transposed else weight, bias)

    return part("gate_up_proj"), part("down_proj")


def halves(both: torch.nn.Linear | Affine, *, interleaved: bool = False) -> list[Affine]:
    half = len(both.weight) // 2
    parts = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(half), slice(half, None))
    return [Affine(both.weight[part], None if both.bias is None else both.bias[part]) for part in parts]
