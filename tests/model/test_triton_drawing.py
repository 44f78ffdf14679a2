"""The Triton kernels that draw, against the reference, on the device or in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from pilotfish.model.cuda import drawing
from pilotfish.model.cuda.drawing import noisy_best
from pilotfish.model.sampling import perturbed_topk_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SEEDS = torch.tensor([0, 7, -1, 2**53 + 1], device=DEVICE)  # -1: of the bits of the largest
POSITIONS = torch.tensor([0, 1, 2**33 + 5, 4095], device=DEVICE)


def scores(columns: int, dropped: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(len(SEEDS), columns, generator=generator, dtype=torch.float64) * 3
    return drawn.masked_fill(torch.rand(drawn.shape, generator=generator) < dropped, -torch.inf).to(DEVICE)


@pytest.mark.parametrize(("columns", "k"), [(5, 1), (37, 4), (5003, 1), (5003, 8)])
@pytest.mark.parametrize("dropped", [0.0, 0.7])
def test_the_best_are_those_of_the_reference(columns: int, k: int, dropped: float) -> None:
    given = scores(columns, dropped)
    values, chosen = noisy_best(given, SEEDS, POSITIONS, k)
    expected, places = perturbed_topk_reference(given, SEEDS, POSITIONS, k)
    kept = expected > -torch.inf
    assert kept.any() and torch.equal(values > -torch.inf, kept)
    assert torch.equal(chosen[kept], places[kept])
    torch.testing.assert_close(values[kept], expected[kept], rtol=1e-13, atol=1e-13)


def test_columns_may_be_tokens_of_a_reduced_vocabulary() -> None:
    ids = torch.arange(0, 3 * 400, 3, device=DEVICE)
    given = scores(400)
    both = (draw(given, SEEDS, POSITIONS, 3, ids) for draw in (noisy_best, perturbed_topk_reference))
    for got, expected in zip(*both, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


def test_of_equals_the_first_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """All noise is of one token."""
    monkeypatch.setattr(drawing, "BLOCK", 64)
    ids, given = (
        torch.zeros(300, dtype=torch.int64, device=DEVICE),
        torch.zeros(len(SEEDS), 300, device=DEVICE).double(),
    )
    given[:, 70] = given[:, 280] = 1.0
    _, chosen = noisy_best(given, SEEDS, POSITIONS, 4, ids)
    assert chosen.tolist() == [[70, 280, 0, 1]] * len(SEEDS)


def test_a_row_does_not_depend_on_the_others() -> None:
    given = scores(3000)
    values, chosen = noisy_best(given, SEEDS, POSITIONS, 2)
    for row in range(len(SEEDS)):
        one = slice(row, row + 1)
        alone = noisy_best(given[one].contiguous(), SEEDS[one], POSITIONS[one], 2)
        assert torch.equal(alone[0], values[one]) and torch.equal(alone[1], chosen[one])
    assert noisy_best(given[:0], SEEDS[:0], POSITIONS[:0], 2)[1].shape == (0, 2)
