"""A model's ranks, as threads: what each holds and reads, and that together they compute what one does."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from sizes import sized
from support import PER_HEAD, random_tree, tiny_model, weights
from thread_ranks import on_threads, thread_groups
from torch import Tensor

from pilotfish.core.features.features import FINAL
from pilotfish.core.scheduling.executor import NodeRows, SequenceRows
from pilotfish.core.trees.tree import EMPTY_TREE
from pilotfish.errors import ParameterError
from pilotfish.model.collective import ProcessGroup, total
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.feature_tap import FeatureTap
from pilotfish.model.loading import shards
from pilotfish.model.loading.configuration import load_config
from pilotfish.model.loading.footprint import footprint
from pilotfish.model.loading.loader import load_model, load_weights
from pilotfish.model.loading.shards import Shard, load_shard

SLOTS = 600
CPU = torch.device("cpu")
#: Those that are divided in ways of their own.
SOME = sized(
    ("llama", "phi3", "olmo2", "gemma2", "qwen3_moe", "qwen2_moe", "glm4_moe", "minimax_m2", "gpt_oss"), tuple(PER_HEAD)
)
#: Ranks of the model, and whether they run without kernels.
CASES = sized([(4, False)], [(2, False), (2, True), (4, False), (4, True)])
#: Fields of single architectures, with other values than the tiny models have, and ranks.
OTHERS: list[tuple[str, int, dict[str, Any]]] = [
    ("llama", 3, {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "vocab_size": 509}),
    ("llama", 2, {"mlp_bias": True, "attention_bias": True, "tie_word_embeddings": True, "pad_token_id": 508}),
    ("qwen3_moe", 2, {"mlp_only_layers": [0]}),
    ("gemma3_text", 2, {"final_logit_softcapping": 2.0, "tie_word_embeddings": False}),
]


class Ranks:
    def __init__(self, directory: Path, ranks: int, dtype: torch.dtype = torch.float32, *, eager: bool = False) -> None:
        models = [load_model(directory, dtype, CPU, eager=eager, group=group) for group in thread_groups(ranks)]
        self.executors = [TorchExecutor(model, SLOTS) for model in models]

    def forward(self, *rows: SequenceRows) -> Tensor:
        logits: Tensor = on_threads([partial(executor.forward, rows) for executor in self.executors])[0]
        return logits


def rows_of(length: int, nodes: int, seed: int = 0, first: int = 0) -> SequenceRows:
    """A prompt and a tree below it, in slots from `first` on; the logits of its last row and of the tree."""
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, 500, nodes) if nodes else EMPTY_TREE
    slots = np.arange(first, first + length + len(tree), dtype=np.int32)
    below = NodeRows.of(tree, slots[length:])
    return SequenceRows(0, rng.integers(0, 500, length).tolist(), slots[:length], below, [length - 1])


def alone(directory: Path, *rows: SequenceRows, eager: bool = False) -> Tensor:
    return TorchExecutor(load_model(directory, torch.float32, CPU, eager=eager), SLOTS).forward(rows)


@pytest.mark.parametrize(("ranks", "eager"), CASES)
@pytest.mark.parametrize("kind", SOME)
def test_logits_are_those_of_one_rank(tiny_models: dict[str, Path], kind: str, ranks: int, eager: bool) -> None:
    """At four ranks two have the same KV head."""
    rows = rows_of(40, 12)
    together = Ranks(tiny_models[kind], ranks, eager=eager).forward(rows)
    torch.testing.assert_close(together, alone(tiny_models[kind], rows, eager=eager), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("kind", "ranks", "options"), OTHERS, ids=str)
def test_other_fields_are_divided_too(tmp_path: Path, kind: str, ranks: int, options: dict[str, Any]) -> None:
    tiny_model(kind, **options).save_pretrained(tmp_path)
    rows = rows_of(20, 6)
    torch.testing.assert_close(Ranks(tmp_path, ranks).forward(rows), alone(tmp_path, rows), rtol=0, atol=1e-4)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("kind", sized(("llama", "olmo2", "gpt_oss"), tuple(PER_HEAD)))
def test_the_first_rank_has_whole_hidden_states(tiny_models: dict[str, Path], kind: str, eager: bool) -> None:
    rows, ranks = rows_of(20, 6), Ranks(tiny_models[kind], 2, eager=eager)
    bits, tap = ranks.forward(rows), FeatureTap((0, 1, 2, FINAL), 4 * 64, lambda states: states, "raw")
    ranks.executors[0] = first = TorchExecutor(ranks.executors[0].model, SLOTS, tap=tap)
    assert torch.equal(ranks.forward(rows), bits)
    whole = TorchExecutor(load_model(tiny_models[kind], torch.float32, CPU, eager=eager), SLOTS, tap=tap)
    whole.forward([rows])
    slots = np.arange(rows.num_rows, dtype=np.int32)
    features, expected = (executor.features(slots) for executor in (first, whole))
    np.testing.assert_allclose(features, expected, rtol=0, atol=1e-5 * float(np.abs(expected).max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", sized(("llama", "gpt_oss"), tuple(PER_HEAD)))
def test_a_row_has_the_same_bits_in_any_company(tiny_models: dict[str, Path], kind: str, dtype: torch.dtype) -> None:
    ranks, mine = Ranks(tiny_models[kind], 4, dtype), rows_of(20, 8)
    bits = ranks.forward(mine)
    for count in sized((7,), (1, 7, 33)):
        other = rows_of(count, count % 5, seed=count, first=100)
        assert torch.equal(ranks.forward(other, mine)[-len(bits) :], bits), f"after {other.num_rows} rows"
        assert torch.equal(ranks.forward(mine, other)[: len(bits)], bits), f"before {other.num_rows} rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [3, 4])
def test_bits_of_a_sum_do_not_depend_on_rows(tmp_path: Path, ranks: int, dtype: torch.dtype) -> None:
    """Over gloo, whose own reductions' bits do."""
    groups = [ProcessGroup(Shard(rank, ranks), CPU) for rank in range(ranks)]
    on_threads([partial(group.connect, tmp_path / "meeting") for group in groups])
    parts = torch.randn(ranks, 70, 96).to(dtype)
    expected = parts[0].float()
    for part in parts[1:]:
        expected = expected + part.float()
    for rows in (1, 2, 16, 17, 70):
        sums = on_threads([partial(total, group, parts[rank, :rows]) for rank, group in enumerate(groups)])
        assert all(torch.equal(x, expected[:rows].to(dtype)) for x in sums), f"{rows} rows"
    gathered = on_threads([partial(group.gather, parts[rank]) for rank, group in enumerate(groups)])
    assert torch.equal(torch.stack([*gathered[0]]), parts) and not any(gathered[1:])


# -- what a rank reads and holds


@pytest.mark.parametrize("kind", sized(("llama", "gpt_oss"), PER_HEAD))
def test_one_shard_is_the_model(tiny_models: dict[str, Path], kind: str) -> None:
    config = load_config(tiny_models[kind])
    whole = load_weights(tiny_models[kind], config, torch.bfloat16)
    shard = load_shard(tiny_models[kind], config, torch.bfloat16, Shard())
    for tensors in ("named_parameters", "named_buffers"):
        expected, own = dict(getattr(whole, tensors)()), dict(getattr(shard, tensors)())
        assert own.keys() == expected.keys()
        assert all(x.dtype == expected[name].dtype and torch.equal(x, expected[name]) for name, x in own.items())


class CountingFile:
    """A weight file that counts the bytes that are read of each of its tensors."""

    def __init__(self, file: Any, read: Counter[str]) -> None:
        self._file, self._read = file, read

    def __enter__(self) -> CountingFile:
        self._file = self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self._file.keys())

    def get_slice(self, name: str) -> CountingSlice:
        return CountingSlice(self._file.get_slice(name), name, self._read)


class CountingSlice:
    def __init__(self, source: Any, name: str, read: Counter[str]) -> None:
        self._source, self._name, self._read = source, name, read
        self.get_shape = source.get_shape

    def __getitem__(self, part: Any) -> Tensor:
        tensor: Tensor = self._source[part]
        self._read[self._name] += tensor.nbytes
        return tensor


@pytest.mark.parametrize("kind", sized(("llama", "phi3", "gpt_oss"), PER_HEAD))
def test_no_rank_reads_all_weights(tiny_models: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tensor is read once by all ranks together, or by each of them; the latter are a few vectors."""
    directory, reads = tiny_models[kind], list[Counter[str]]()
    config = load_config(directory)
    for rank in range(2):
        read = Counter[str]()
        monkeypatch.setattr(shards, "safe_open", lambda file, read=read, **_: CountingFile(safe_open(file, "pt"), read))
        load_shard(directory, config, torch.float32, Shard(rank, 2))
        reads.append(read)
    with safe_open(weights(directory), framework="pt") as file:
        sizes = {name: file.get_tensor(name).nbytes for name in file.keys()}  # noqa: SIM118
    for name, size in sizes.items():
        own = [read[name] for read in reads]
        small = any(part in name for part in ("norm", "router", "gate.weight", "e_score"))
        assert own == [size, size] if small else sum(own) == size, name
    assert all(sum(read.values()) < 0.6 * sum(sizes.values()) for read in reads)


@pytest.mark.parametrize(
    ("options", "ranks", "line"),
    [
        ({}, 3, "tensor_parallel: 3 is not allowed; expected a divisor or a multiple of the model's 2 KV heads"),
        ({}, 8, "tensor_parallel: 8 is not allowed; expected a divisor of the model's 4 attention heads"),
        ({"intermediate_size": 97}, 2, "tensor_parallel: 2 is not allowed; expected a divisor of the model's 97 n"),
    ],
)
def test_what_does_not_divide_is_refused(tmp_path: Path, options: dict[str, Any], ranks: int, line: str) -> None:
    tiny_model("llama", **options).save_pretrained(tmp_path)
    for refused in (
        lambda: footprint(tmp_path, torch.float32, CPU, eager=False, ranks=ranks),
        lambda: load_model(tmp_path, torch.float32, CPU, eager=False, group=thread_groups(ranks)[0]),
    ):
        with pytest.raises(ParameterError, match=line):
            refused()
