"""Recorded forwards and the sizes they come in. The recorder only remembers the call; CUDA's is tested in tests/gpu."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from support import VOCAB, random_tree
from transformers import LlamaConfig, MixtralConfig

from pilotfish.core.features.features import FINAL
from pilotfish.core.scheduling.executor import NodeRows, SequenceRows
from pilotfish.model.attention import key_slots
from pilotfish.model.batch import CUBLAS, EXACT, GRAPHS, Batch, Buckets
from pilotfish.model.cuda import graphs
from pilotfish.model.cuda.graphs import GraphCache, recordable
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.feature_tap import FeatureTap
from pilotfish.model.loading.loader import load_model

CPU = torch.device("cpu")
ROWS = CUBLAS.rows[-1]


class Recorder:
    """As in CUDA, a replay reads and writes the memory of the first call."""

    def __init__(self) -> None:
        self.recordings = 0

    def __call__(self, call: Callable[[], None]) -> Callable[[], None]:
        self.recordings += 1
        call()
        return call


def sequence(tokens: int, nodes: int, seed: int, start: int = 0) -> SequenceRows:
    """Tokens and a random tree at slots of their own: seed 0 from 0 on, seed 1 from 500 on."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, VOCAB, nodes)
    first = 500 * seed
    slots = np.arange(first + 400, first + 400 + len(tree), dtype=np.int32)
    prefix = np.arange(first, first + tokens, dtype=np.int32)
    ids = rng.integers(0, VOCAB, tokens).tolist()
    return SequenceRows(start, ids[start:], prefix, NodeRows.of(tree, slots), kept=[len(ids) - start - 1])


@pytest.fixture
def plain(llama: Path) -> TorchExecutor:
    return TorchExecutor(load_model(llama, torch.float32, CPU, eager=True), 1000)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def recorded(llama: Path, recorder: Recorder) -> TorchExecutor:
    """As on CUDA with --eager, but on the CPU."""
    executor = TorchExecutor(load_model(llama, torch.float32, CPU, eager=True), 1000)
    executor.buckets = CUBLAS
    executor._forward = GraphCache(executor._run_model, executor._draw, recorder, CPU)
    return executor


def test_replays_give_the_results_of_the_forward(
    plain: TorchExecutor, recorded: TorchExecutor, recorder: Recorder
) -> None:
    for tokens, nodes in ((9, 0), (1, 5), (33, 8), (40, 20), (9, 1)):
        rows = [sequence(tokens, nodes, 0)]
        assert torch.equal(recorded.forward(rows), plain.forward(rows)), f"{tokens} tokens, {nodes} nodes"
    assert recorder.recordings == 1


def test_other_shapes_are_recorded_anew(plain: TorchExecutor, recorded: TorchExecutor, recorder: Recorder) -> None:
    paths = np.tile(np.arange(400, 410, dtype=np.int32), (10, 1))
    chain = NodeRows(np.arange(10), np.arange(1, 11), paths)
    one, two, deep = (
        [sequence(9, 2, 0)],
        [sequence(9, 2, 0), sequence(12, 3, 1)],
        [replace(sequence(9, 0, 0), nodes=chain)],
    )
    for rows in (one, two, deep, two, one, deep):
        assert torch.equal(recorded.forward(rows), plain.forward(rows))
    assert recorder.recordings == 2  # one, or two, share a shape


def test_prefixes_that_outgrow_the_memory(
    plain: TorchExecutor, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "FIRST", 4608)
    recorded = TorchExecutor(plain.model, 1000)
    recorded.buckets = CUBLAS
    recorded._forward = GraphCache(recorded._run_model, recorded._draw, recorder, CPU)
    few, many = [sequence(9, 2, 0)], [sequence(9, 2, 0), sequence(490, 0, 1, start=489)]
    for rows in (few, many, few):
        assert torch.equal(recorded.forward(rows), plain.forward(rows))
    assert recorder.recordings == 2


def test_replays_keep_features(plain: TorchExecutor, recorder: Recorder) -> None:
    tap = FeatureTap((0, 2, FINAL), 5, lambda states: states[:, ::40], "every 40th")
    executor, recorded = (TorchExecutor(plain.model, 1000, tap=tap) for _ in range(2))
    recorded.buckets = CUBLAS
    recorded._forward = GraphCache(recorded._run_model, recorded._draw, recorder, CPU)
    for tokens, nodes, seed in ((9, 0, 0), (12, 5, 1), (33, 8, 0)):
        rows = sequence(tokens, nodes, seed)
        slots = np.concatenate((rows.prefix_slots, rows.nodes.slots)) if nodes else rows.prefix_slots
        for each in (executor, recorded):
            each.forward([rows])
        features = recorded.features(slots)
        assert np.array_equal(features, executor.features(slots)) and features.any(axis=1).all()
    assert recorder.recordings == 1


def test_logits_outlive_the_next_replay(recorded: TorchExecutor) -> None:
    first = recorded.forward([sequence(9, 2, 0)])
    kept = first.clone()
    recorded.forward([sequence(9, 2, 1)])
    assert torch.equal(first, kept)


def test_a_recorded_batch_is_not_the_callers(recorded: TorchExecutor) -> None:
    mine, other = recorded.prepare([sequence(9, 2, 0)]), recorded.prepare([sequence(9, 2, 1)])
    before = [tensor.clone() for tensor in mine[0].tensors()]
    recorded.run(mine)
    recorded.run(other)
    assert all(map(torch.equal, mine[0].tensors(), before))


def test_more_rows_than_a_forward_takes_run_as_several(
    plain: TorchExecutor, recorded: TorchExecutor, recorder: Recorder
) -> None:
    for rows in ([sequence(150, 0, 0)], [sequence(150, 30, 0, start=149), sequence(50, 40, 1)]):
        batches = recorded.prepare(rows)
        assert len(batches) > 1 and {len(batch.input_ids) for batch in batches} == {ROWS}
        assert torch.equal(recorded.run(batches).logits, plain.forward(rows))
    assert recorder.recordings == 2  # of which one counts layers


def test_rows_that_give_no_logits(recorded: TorchExecutor) -> None:
    rows = [replace(sequence(70, 0, 0), kept=())]
    assert recorded.forward(rows).shape == (0, VOCAB)


# -- prefixes that sequences have in common


def family(rng: np.random.Generator, shared: int, rests: Sequence[int], slots: int = 4000) -> list[SequenceRows]:
    """Sequences that begin with the same `shared` slots, with trees and without, and some with their last tokens."""
    free, sequences = iter(rng.permutation(slots).astype(np.int32)), list[SequenceRows]()
    common = [next(free) for _ in range(shared)]
    for place, rest in enumerate(rests):
        prefix = np.array([*common, *(next(free) for _ in range(rest))], np.int32)
        tree = random_tree(rng, VOCAB, 5 * (place % 2))
        nodes = NodeRows.of(tree, np.array([next(free) for _ in range(len(tree))], np.int32))
        count = min(1 + place % 3, len(prefix))
        tokens = rng.integers(0, VOCAB, count).tolist()
        sequences.append(SequenceRows(len(prefix) - count, tokens, prefix, nodes, kept=[count - 1]))
    return sequences


def seen(sequences: Sequence[SequenceRows]) -> list[list[int]]:
    """Slots that each row sees, in order."""
    each = list[list[int]]()
    for s in sequences:
        prefix = s.prefix_slots.tolist()
        each += [prefix[: s.start + place + 1] for place in range(len(s.tokens))]
        each += [
            prefix + path[:depth] for path, depth in zip(s.nodes.paths.tolist(), s.nodes.depths.tolist(), strict=True)
        ]
    return each


@pytest.mark.parametrize("seed", range(30))
def test_rows_see_their_own_slots_whatever_is_shared(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sequences = list[SequenceRows]()
    for _ in range(rng.integers(1, 4)):
        sequences += family(
            rng, int(rng.choice([3, 40, 90])), rng.integers(0, 600 if seed % 5 == 0 else 30, 3).tolist()
        )
    for shared in (0, 1, 32):
        [batch] = Batch.build(sequences, Buckets(shared=shared), 4000)
        slots, positions = key_slots(batch.metadata).tolist(), batch.metadata.row_positions.tolist()
        assert [row[: position + 1] for row, position in zip(slots, positions, strict=True)] == seen(sequences)


def test_a_prompts_samples_share_its_prefix() -> None:
    """Sequences that go on too long after it keep it for themselves."""
    rng = np.random.default_rng(0)
    alone, samples, long = family(rng, 50, [3]), family(rng, 100, [0, 9, 4]), family(rng, 100, [600, 600])
    [batch] = Batch.build([*alone, *samples, *long], Buckets(shared=64), 4000)
    assert sorted(set(batch.metadata.row_starts.tolist())) == [0, 53, 153, 853]
    assert len(batch.metadata.prefix_slots) == 1553 and batch.metadata.longest == 700


def test_logits_do_not_depend_on_what_is_shared(plain: TorchExecutor) -> None:
    rng = np.random.default_rng(3)
    sequences = family(rng, 70, [0, 5, 17], slots=1000)
    expected = plain.forward(sequences)
    plain.buckets = Buckets(shared=64)
    [batch] = plain.prepare(sequences)
    assert len(set(batch.metadata.row_starts.tolist())) == 1
    assert torch.equal(plain.forward(sequences), expected)


@pytest.mark.parametrize(("rows", "padded"), [(1, 16), (16, 16), (17, 64), (256, 256), (257, 512), (1030, 1040)])
def test_rows_are_padded_to_buckets(rows: int, padded: int) -> None:
    assert GRAPHS.pad_rows(rows) == padded
    assert CUBLAS.pad_rows(rows) == -(-rows // ROWS) * ROWS
    assert EXACT.pad_rows(rows) == rows


def test_forwards_that_read_their_own_results_are_not_recorded() -> None:
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert recordable(LlamaConfig())
    assert not recordable(LlamaConfig(rope_parameters=dynamic))
    assert recordable(MixtralConfig())
