"""Mixtures of experts against transformers' own, and rows whose bits are their own whoever shares an expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import tiny_model

from pilotfish.model.cpu.native import load_kernels
from pilotfish.model.cpu.native_modules import NativeKernels
from pilotfish.model.experts import ExpertRouter, Mixture

ROWS = 300
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_moe", {"num_experts": 32, "num_experts_per_tok": 8}),
    ("qwen3_moe", {"num_experts": 32, "num_experts_per_tok": 8, "norm_topk_prob": True}),
    ("mixtral", {}),
    ("gpt_oss", {}),
]


def blocks(kind: str, options: dict[str, Any], native: bool) -> tuple[torch.nn.Module, torch.nn.Module]:
    reference, ours = (
        tiny_model(kind, experts_implementation=implementation, **options).eval()
        for implementation in ("eager", "pilotfish")
    )
    if native:
        assert load_kernels()
        ours.config.architectures = [type(ours).__name__]  # as in a saved model
        ours = NativeKernels(torch.device("cpu")).replace(ours, 64, alone=True)
    return reference.model.layers[1].mlp, ours.model.layers[1].mlp  # type: ignore[union-attr, index, return-value]


def outputs(block: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = block(x[None])
    return (y[0] if isinstance(y, tuple) else y)[0]


@pytest.mark.parametrize("native", [True, False], ids=["native", "eager"])
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
@torch.inference_mode()
def test_a_mixture_is_that_of_transformers(kind: str, options: dict[str, Any], native: bool) -> None:
    reference, ours = blocks(kind, options, native)
    for part in (Mixture, ExpertRouter):
        assert any(isinstance(child, part) for child in ours.children()) is native
    x = torch.randn(ROWS, 64)
    torch.testing.assert_close(outputs(ours, x), outputs(reference, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("native", [True, False], ids=["native", "eager"])
@pytest.mark.parametrize(("kind", "options"), KINDS, ids=str)
@torch.inference_mode()
def test_a_row_has_the_same_bits_whoever_shares_its_experts(
    kind: str, options: dict[str, Any], native: bool, threads: int
) -> None:
    _, ours = blocks(kind, options, native)
    x = torch.randn(ROWS, 64)
    together = outputs(ours, x)
    torch.set_num_threads(threads)
    least = 1 if native else 16  # the runner's smallest bucket
    for rows in (least, least + 1, 33, 64, 250):
        assert torch.equal(outputs(ours, x[:rows]), together[:rows]), f"{rows} rows"
        chosen = torch.randperm(ROWS)[:rows]
        assert torch.equal(outputs(ours, x[chosen]), together[chosen]), f"{rows} rows anywhere"
