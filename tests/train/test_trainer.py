"""The optimizer; what is known of a training before it ends."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pilotfish.progress import PlannedPhase
from pilotfish.train.models import WrittenTokens
from pilotfish.train.trainer import Learnt, Muon, Schedule, Trainer, orthogonalise


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


# -- what a step takes


def trainer(directory: Path, steps: int = 6) -> Trainer:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    schedule = Schedule(tokens=steps, tokens_per_step=1, learning_rate=0.1, checkpoint_every=4)

    def loss_of(x: torch.Tensor) -> Learnt:
        return Learnt((model(x) - x).square().sum())

    return Trainer(model, [model.weight], schedule, directory, loss_of)


def test_steps_that_are_measured_train_nothing(watched: Any, tmp_path: Path) -> None:
    measured, fresh = trainer(tmp_path / "draft"), trainer(tmp_path / "fresh")
    batch = [torch.eye(8)]
    assert measured.plan(batch, watched) == PlannedPhase("training draft", 6, 1.0)
    assert not (tmp_path / "draft").exists()
    for one in (measured, fresh):
        one.run(lambda _: batch, watched)
    assert torch.equal(measured.matrices[0], fresh.matrices[0])
    assert not torch.equal(measured.matrices[0], trainer(tmp_path).matrices[0])


def test_of_a_run_that_goes_on_the_rest_is_planned(watched: Any, tmp_path: Path) -> None:
    """Its last checkpoint was at step 4."""
    interrupted, batch = trainer(tmp_path / "draft"), [torch.eye(8)]

    def batch_at(step: int) -> list[torch.Tensor]:
        if step == 5:
            raise KeyboardInterrupt
        return batch

    with pytest.raises(KeyboardInterrupt):
        interrupted.run(batch_at, watched)
    assert trainer(tmp_path / "draft").plan(batch, watched).units == 2
    trainer(tmp_path / "draft").run(lambda _: batch, watched)
    assert trainer(tmp_path / "draft").plan(batch, watched) == PlannedPhase("training draft", 0)


def test_answers_that_end_early_are_counted_to_the_end() -> None:
    told = list[float]()
    heard = WrittenTokens(100, 7, told.append)
    for _ in range(3):
        assert not heard(torch.zeros(4, 9, dtype=torch.int64), torch.zeros(4, 5)).any()
    assert told == [14, 14, 14]
    heard.rest()
    assert sum(told) == 100
