import pytest
import torch

from pilotfish.train.trainer import Muon, orthogonalise


@pytest.mark.parametrize("shape", [(16, 16), (8, 32), (32, 8)])
def test_singular_values_come_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
    assert values.min() > 0.4 and values.max() < 1.3


def test_a_step_is_as_large_as_adamws() -> None:
    matrix = torch.nn.Parameter(torch.zeros(64, 64))
    matrix.grad = torch.randn(64, 64)
    Muon([matrix], 0.01, momentum=0.95, weight_decay=0.0).step()
    assert matrix.detach().square().mean().sqrt().item() == pytest.approx(0.002, rel=0.2)


def test_it_finds_the_least_squares_solution() -> None:
    torch.manual_seed(0)
    matrix, wanted = torch.nn.Parameter(torch.zeros(8, 8)), torch.randn(8, 8)
    for step in range(200):
        (matrix - wanted).square().sum().backward()
        optimizer = Muon([matrix], 0.2 * (1 - step / 200), momentum=0.0, weight_decay=0.0)
        optimizer.step()
        optimizer.zero_grad()
    assert (matrix - wanted).abs().max() < 0.05
