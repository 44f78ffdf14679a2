import numpy as np
import torch

from pilotfish.train.batches import Windows

CPU = torch.device("cpu")


def _windows(tokens: int = 1000, seed: int = 3) -> Windows:
    return Windows(np.arange(tokens, dtype=np.uint16), rows=2, length=10, context=500, seed=seed)


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    first, again, other = _windows().batch(7, CPU), _windows().batch(7, CPU), _windows(seed=4).batch(7, CPU)
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.positions, again.positions)
    assert not torch.equal(first.tokens, other.tokens)


def test_targets_are_the_inputs_one_further() -> None:
    batch = _windows().batch(0, CPU)
    assert batch.inputs.shape == batch.targets.shape == batch.positions.shape == (2, 10)
    assert torch.equal(batch.targets, batch.inputs + 1)


def test_an_epoch_visits_every_window_once() -> None:
    windows = _windows(tokens=110)  # ten windows: five steps
    starts = [int(row[0]) for step in range(5) for row in windows.batch(step, CPU).tokens]
    assert len({start // 10 for start in starts}) == 10
    assert len({start % 10 for start in starts}) == 1


def test_shortest_text_has_a_window() -> None:
    for step in range(50):
        assert _windows(tokens=20).batch(step, CPU).tokens.shape == (2, 11)


def test_some_rows_jump_once_and_stay_within_the_context() -> None:
    jumps = []
    for step in range(200):
        positions = _windows().batch(step, CPU).positions
        assert positions[:, 0].eq(0).all() and positions.max() < 500
        jumps += ((positions.diff(dim=1) != 1).sum(1)).tolist()
    assert set(jumps) == {0, 1}
    assert 0.15 < np.mean(jumps) < 0.35
