"""Grouped products of experts against each expert by itself, on the device or in Triton's interpreter."""

import pytest
import torch
from sizes import paired

pytest.importorskip("triton")

from pilotfish.model.cuda.experts import Tiles
from pilotfish.model.cuda.kernels import CUDAKernels
from pilotfish.model.experts import Affine, Expert
from pilotfish.model.kernels import Gate, Kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN, INNER, EXPERTS, CHOICES = 40, 72, 5, 2
GATES = [Gate("silu"), Gate("clamped", 1.7, 7.0)]


def experts(biased: bool, dtype: torch.dtype) -> list[Expert]:
    generator = torch.Generator().manual_seed(0)

    def affine(outputs: int, inputs: int) -> Affine:
        weight, bias = torch.randn(outputs, inputs, generator=generator) / 6, torch.randn(outputs, generator=generator)
        return Affine(weight.to(DEVICE, dtype), bias.to(DEVICE, dtype) if biased else None)

    return [Expert(affine(INNER, HIDDEN), affine(INNER, HIDDEN), affine(HIDDEN, INNER)) for _ in range(EXPERTS)]


def routed(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, experts that rows chose (never the last one), and their weights."""
    generator = torch.Generator().manual_seed(1)
    x, scores = torch.randn(rows, HIDDEN, generator=generator), torch.randn(rows, EXPERTS - 1, generator=generator)
    weights, chosen = scores.softmax(dim=-1).topk(CHOICES)
    return x.to(DEVICE, dtype), chosen.to(DEVICE), weights.to(DEVICE)


@pytest.mark.parametrize(
    ("rows", "case"), paired([1, 9, 60], [(g, d) for g in GATES for d in (torch.float32, torch.bfloat16)]), ids=str
)
def test_a_mixture_is_that_of_the_reference(rows: int, case: tuple[Gate, torch.dtype]) -> None:
    gate, dtype = case
    each = experts(gate.kind == "clamped", dtype)
    got, expected = (k(DEVICE).mixture(each, gate)(*routed(rows, dtype)) for k in (CUDAKernels, Kernels))
    tolerance = 1e-4 if dtype == torch.float32 else 2**-5
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def test_a_row_does_not_depend_on_what_others_chose() -> None:
    x, chosen, weights = routed(60, torch.float32)
    mixture = CUDAKernels(DEVICE).mixture(experts(True, torch.float32), GATES[0])
    together = mixture(x, chosen, weights)
    for some in ([0], [59, 3], [*range(20, 40)]):
        assert torch.equal(mixture(x[some], chosen[some], weights[some]), together[some]), f"rows {some}"


@pytest.mark.parametrize("pairs", [1, 7, 80, 81, 500])
def test_tiles_hold_each_pair_once_with_its_expert(pairs: int) -> None:
    chosen = torch.randint(0, EXPERTS, (pairs,), generator=torch.Generator().manual_seed(pairs)) // 2 * 2
    tiles = Tiles.of(chosen.to(DEVICE), EXPERTS)
    assert torch.equal(tiles.order.cpu(), chosen.argsort(stable=True))
    seen = list[int]()
    for expert, start, end in zip(tiles.experts.tolist(), tiles.starts.tolist(), tiles.ends.tolist(), strict=True):
        held = tiles.order[start : max(start, end)].tolist()
        assert len(held) <= tiles.size and {int(chosen[pair]) for pair in held} <= {expert}
        seen += held
    assert sorted(seen) == list(range(pairs))
