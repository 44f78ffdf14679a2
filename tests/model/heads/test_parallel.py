"""Medusa's heads are what the formulas say, and a root's feature lives as long as its slot."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from block_heads import HIDDEN, parallel_head, parallel_log_chances
from block_rig import Sequenced, executor_of, log_chances
from msgspec import structs

from pilotfish.model.heads.spec import HeadFiles

PATHS = [[5], [9], [5, 2], [1, 2, 3], [1, 2, 4], [3, 1, 4, 1]]


def expected(files: HeadFiles, sequence: Sequenced, paths: list[list[int]]) -> torch.Tensor:
    return torch.stack([parallel_log_chances(files, sequence.known[-1], len(path) + 1) for path in paths])


@pytest.mark.parametrize("eager", [False, True], ids=["kernels", "torch"])
@pytest.mark.parametrize("reduced", [False, True])
def test_formulas(eager: bool, reduced: bool) -> None:
    files = parallel_head(reduced=reduced)
    executor = executor_of(files, eager=eager)
    one, other = Sequenced.random(9, range(100), seed=1), Sequenced.random(4, range(100, 200), seed=2)
    told = log_chances(executor, [one.chunk(), other.chunk()])
    both = torch.cat((expected(files, one, [[]]), expected(files, other, [[]])))
    torch.testing.assert_close(told, both, atol=1e-4, rtol=0.0)
    for _ in range(2):
        told = log_chances(executor, [other.nodes(PATHS), one.nodes(PATHS)])
        both = torch.cat((expected(files, other, PATHS), expected(files, one, PATHS)))
        torch.testing.assert_close(told, both, atol=1e-4, rtol=0.0)
        one.tokens.append(3)
        assert (log_chances(executor, [one.chunk()]) - expected(files, one, [[]])).abs().nan_to_num().max() < 1e-4


def test_batches_are_alone() -> None:
    files = parallel_head()
    executor, alone = executor_of(files), executor_of(files)
    sequences = [Sequenced.random(5 + i, range(40 * i, 40 * i + 40), seed=i) for i in range(6)]
    chunks = [sequence.chunk() for sequence in sequences]
    nodes = [sequence.nodes(PATHS) for sequence in sequences]
    for rows in (chunks, nodes):
        assert torch.equal(log_chances(executor, rows), torch.cat([log_chances(alone, [s]) for s in rows]))


def test_lost_features() -> None:
    files = parallel_head()
    executor, sequence = executor_of(files), Sequenced.random(6, range(50), seed=3)
    chunk = sequence.chunk()
    assert chunk.features is not None
    lost = chunk.features.copy()
    lost[-2:] = np.nan
    told = log_chances(executor, [structs.replace(chunk, features=lost)])
    torch.testing.assert_close(told[0], parallel_log_chances(files, sequence.features[2], 1), atol=1e-4, rtol=0.0)
    sequence.tokens.append(8)
    later = structs.replace(sequence.chunk(), features=np.full((1, HIDDEN), np.nan, np.float32))
    assert torch.equal(log_chances(executor, [later]), told)
    zeros = log_chances(executor_of(files), [later])
    torch.testing.assert_close(zeros[0], parallel_log_chances(files, torch.zeros(HIDDEN), 1), atol=1e-4, rtol=0.0)


def test_slots_of_others() -> None:
    executor, sequence = executor_of(parallel_head()), Sequenced.random(6, range(50), seed=3)
    log_chances(executor, [sequence.chunk()])
    nodes = sequence.nodes(PATHS)
    assert log_chances(executor, [nodes])[0].isfinite().all()
    log_chances(executor, [Sequenced.random(6, range(50), seed=4).chunk(kept=False)])
    assert log_chances(executor, [nodes]).isneginf().all()
