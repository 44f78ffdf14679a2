"""Block drafters and Medusa's heads are what their papers' formulas say: after prompts, commits and anchors anew, with
kernels and without."""

import numpy as np
import pytest
import torch
from block_heads import (
    BLOCKS,
    HIDDEN,
    BlockFormulas,
    block_head,
    executor_of,
    log_chances,
    parallel_head,
    parallel_log_chances,
    sequenced,
)
from msgspec import structs
from recording import RecordingKernels
from recurrent_formulas import Drafted
from support import RowSampling, sampling_of

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import Outcome, SequenceRows
from pilotfish.model.heads.executor import HeadSetup
from pilotfish.model.heads.families.block import BLOCKS as BLOCKS_AT_ONCE
from pilotfish.model.heads.families.block import BlockExecutor
from pilotfish.model.heads.families.medusa import MedusaHead
from pilotfish.model.heads.spec import HeadFiles

PATHS: list[tuple[int, ...]] = [(5,), (9,), (5, 2), (5, 2, 8), (1, 2, 3, 4), (3, 1, 4, 1, 5), (3, 1, 4, 1, 5, 9)]
ROOT: list[tuple[int, ...]] = [()]
#: Medusa's heads give three tokens.
MEDUSAS: list[tuple[int, ...]] = [(5,), (9,), (5, 2), (1, 2, 3), (1, 2, 4), (3, 1, 4, 1)]


def expected(files: HeadFiles, sequence: Drafted, paths: list[tuple[int, ...]]) -> torch.Tensor:
    if isinstance(files.spec.head, MedusaHead):
        return torch.stack([parallel_log_chances(files, sequence.known[-1], len(path) + 1) for path in paths])
    formulas, root = BlockFormulas(files), sequence.tokens[-1]
    return torch.stack([formulas.log_chances(sequence.known, root, [*path]) for path in paths])


def assert_as_formulas(told: torch.Tensor, files: HeadFiles, *wanted: tuple[Drafted, list[tuple[int, ...]]]) -> None:
    of_formulas = torch.cat([expected(files, sequence, paths) for sequence, paths in wanted])
    torch.testing.assert_close(told, of_formulas, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("eager", [False, True], ids=["kernels", "torch"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_formulas(kind: str, eager: bool) -> None:
    files = block_head(kind)
    executor, sequence = executor_of(files, eager=eager), sequenced(13, range(100, 160), seed=1)
    assert not len(log_chances(executor, [structs.replace(sequence.chunk(6), kept=[])]))
    assert_as_formulas(log_chances(executor, [sequence.chunk()]), files, (sequence, ROOT))
    assert_as_formulas(log_chances(executor, [sequence.level(PATHS)]), files, (sequence, PATHS))
    sequence.commit([17, 4])
    assert_as_formulas(log_chances(executor, [sequence.chunk()]), files, (sequence, ROOT))
    assert_as_formulas(log_chances(executor, [sequence.level(PATHS)]), files, (sequence, PATHS))


def told(executor: BlockExecutor, sequence: Drafted, params: SamplingParams) -> list[Outcome]:
    """After a chunk, a level of nodes, and a commit."""

    def of(rows: SequenceRows) -> Outcome:
        kept = len(rows.kept) + len(rows.nodes)
        sampling = sampling_of([RowSampling(params, 3, 7 + i) for i in range(kept)], children=4)
        return executor.execute([rows], structs.replace(sampling, rows=None))

    outcomes = [of(sequence.chunk()), of(sequence.level(PATHS)), of(sequence.level(PATHS[:3]))]
    sequence.commit([17, 4])
    return [*outcomes, of(sequence.chunk())]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", BLOCKS)
def test_levels_may_be_recorded_and_draw(kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward of blocks once, as all have one block after few tokens; what comes below a root once."""
    params, kernels = SamplingParams(temperature=temperature), RecordingKernels()
    executors = [executor_of(block_head(kind), eager=True)]
    monkeypatch.setattr(HeadSetup, "kernels", lambda *_: kernels)
    executors.append(executor_of(block_head(kind), eager=True))
    each = []
    for executor in executors:
        assert isinstance(executor, BlockExecutor)
        each.append(told(executor, sequenced(13, range(100, 160), seed=1), params))
    for got, expected in zip(each[1], each[0], strict=True):
        assert got.log_chances is not None and expected.log_chances is not None
        possible = expected.log_chances > -np.inf
        assert np.array_equal(got.log_chances > -np.inf, possible) and list(got.broken) == list(expected.broken)
        assert np.array_equal(got.tokens[possible], expected.tokens[possible])
        np.testing.assert_allclose(got.log_chances[possible], expected.log_chances[possible], rtol=1e-5, atol=1e-5)
    assert kernels.recordings == 2


@pytest.mark.parametrize("kind", [*BLOCKS, "medusa"])
def test_batches_are_alone(kind: str) -> None:
    files, count = parallel_head() if kind == "medusa" else block_head(kind), BLOCKS_AT_ONCE + 2
    executor, alone = (executor_of(files, num_slots=40 * count) for _ in range(2))
    sequences = [sequenced(2 + i % 17, range(40 * i, 40 * i + 40), seed=i) for i in range(count)]
    chunks = [sequence.chunk() for sequence in sequences]
    nodes = [sequence.level(PATHS[i % 5 :]) for i, sequence in enumerate(sequences)]
    for rows in (chunks, nodes):
        assert torch.equal(log_chances(executor, rows), torch.cat([log_chances(alone, [s]) for s in rows]))


def test_states_are_kept_or_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    files = block_head("dspark")
    monkeypatch.setattr("pilotfish.model.heads.roots.ROOTS", 2)
    executor = executor_of(files)
    assert isinstance(executor, BlockExecutor)
    sequences = [sequenced(5 + i, range(40 * i, 40 * i + 40), seed=i) for i in range(3)]
    log_chances(executor, [sequence.chunk() for sequence in sequences])
    blocks = list[int]()
    forward = executor.decoder.forward
    monkeypatch.setattr(executor.decoder, "forward", lambda ids, slots: blocks.append(len(ids)) or forward(ids, slots))
    for sequence in sequences[::-1]:
        assert_as_formulas(log_chances(executor, [sequence.level(PATHS)]), files, (sequence, PATHS))
    assert blocks == [1]


def test_lost_features() -> None:
    files = block_head("dspark")
    executor, sequence = executor_of(files), sequenced(9, range(50), seed=3)
    chunk = sequence.chunk()
    assert chunk.features is not None
    told = chunk.features.copy()
    told[[1, 5, 6]] = torch.nan
    sequence.features[0], sequence.features[4:6] = 0.0, sequence.features[3]
    told = log_chances(executor, [structs.replace(chunk, features=told)])
    assert_as_formulas(told, files, (sequence, ROOT))


# -- Medusa's


@pytest.mark.parametrize("eager", [False, True], ids=["kernels", "torch"])
@pytest.mark.parametrize("reduced", [False, True])
def test_formulas_of_medusas(eager: bool, reduced: bool) -> None:
    files = parallel_head(reduced=reduced)
    executor = executor_of(files, eager=eager)
    one, other = sequenced(9, range(100), seed=1), sequenced(4, range(100, 200), seed=2)
    assert_as_formulas(log_chances(executor, [one.chunk(), other.chunk()]), files, (one, ROOT), (other, ROOT))
    for _ in range(2):
        told = log_chances(executor, [other.level(MEDUSAS), one.level(MEDUSAS)])
        assert_as_formulas(told, files, (other, MEDUSAS), (one, MEDUSAS))
        one.commit([3])
        assert_as_formulas(log_chances(executor, [one.chunk()]), files, (one, ROOT))


def test_lost_features_of_medusas() -> None:
    files = parallel_head()
    executor, sequence = executor_of(files), sequenced(6, range(50), seed=3)
    chunk = sequence.chunk()
    assert chunk.features is not None
    lost = chunk.features.copy()
    lost[-2:] = np.nan
    told = log_chances(executor, [structs.replace(chunk, features=lost)])
    torch.testing.assert_close(told[0], parallel_log_chances(files, sequence.known[2], 1), atol=1e-4, rtol=0.0)
    sequence.commit([8])
    later = structs.replace(sequence.chunk(), features=np.full((1, HIDDEN), np.nan, np.float32))
    assert torch.equal(log_chances(executor, [later]), told)
    zeros = log_chances(executor_of(files), [later])
    torch.testing.assert_close(zeros[0], parallel_log_chances(files, torch.zeros(HIDDEN), 1), atol=1e-4, rtol=0.0)


def test_slots_of_others() -> None:
    executor, sequence = executor_of(parallel_head()), sequenced(6, range(50), seed=3)
    log_chances(executor, [sequence.chunk()])
    nodes = sequence.level(MEDUSAS)
    assert log_chances(executor, [nodes])[0].isfinite().all()
    log_chances(executor, [structs.replace(sequenced(6, range(50), seed=4).chunk(), kept=[])])
    assert log_chances(executor, [nodes]).isneginf().all()
