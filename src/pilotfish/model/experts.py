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


def affine(linear: Any) -> Affine:
    return Affine(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())


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


class GroupedRouter(torch.nn.Module):
    """The best groups' best experts, weighted by their scores: sigmoids, which are chosen by with a `correction` added,
    or without one (DeepSeek-V2) the softmax over all experts."""

    def __init__(self, router: Any, weight: Tensor, correction: Tensor | float | None) -> None:
        super().__init__()
        self.dtype, (outputs, inputs) = weight.dtype, weight.shape
        self.linear = torch.nn.Linear(inputs, outputs, bias=False, device="meta")
        self.linear.weight = torch.nn.Parameter(weight.detach(), requires_grad=False)
        self.correction, self.k = correction, router.top_k
        grouped = getattr(router, "topk_method", None) != "greedy"
        self.groups: int = getattr(router, "num_group", 1) if grouped else 1
        self.kept: int = getattr(router, "topk_group", 1) if grouped else 1
        self.scale = getattr(router, "routed_scaling_factor", 1.0)
        self.normed = getattr(router, "norm_topk_prob", correction is not None)  # to a sum of 1

    def forward(self, hidden_states: Tensor, correction: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.linear(hidden_states.flatten(0, -2).to(self.dtype)).float()
        added = self.correction if correction is None else correction
        scores = logits.softmax(dim=-1) if added is None else sigmoid(logits)
        chosen = self._of_best_groups(scores if added is None else scores + added).topk(self.k, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.normed:
            weights = weights / (_sum(weights)[:, None] + 1e-20)
        return logits, weights * self.scale, chosen

    def _of_best_groups(self, ranks: Tensor) -> Tensor:
        """Minus infinity elsewhere. A group is worth its best expert or, with a correction, its best two."""
        if self.groups == self.kept:
            return ranks
        grouped = ranks.view(len(ranks), self.groups, -1)
        worth = _sum(grouped.topk(1 if self.correction is None else 2, dim=-1).values)
        best = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, worth.topk(self.kept, dim=-1).indices, value=True)
        return grouped.masked_fill(~best[..., None], -torch.inf).flatten(1)


def _sum(x: Tensor) -> Tensor:
    """Over the last dimension, in order."""
    return functools.reduce(torch.add, x.unbind(-1))


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


def row_by_row(module: Any) -> torch.nn.Module | None:
    """What replaces a part of a mixture in which torch's bits of a row depend on others. Its linear layers are still
    torch's."""
    if hasattr(module, "shared_expert_gate"):
        return GatedSharedMixture(module)
    if type(module).__name__ == "MiniMaxM2TopKRouter":  # its block has the correction
        return GroupedRouter(module, module.weight, correction=0.0)
    if type(module).__name__.endswith("TopkRouter"):
        correction = getattr(module, "e_score_correction_bias", None)
        return GroupedRouter(module, module.weight.float(), None if correction is None else correction.clone())
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
