"""Tests that need a CUDA device. `make gpu` runs `tests/model/test_triton_*.py` on it too.

None of this asserts a time. Bits and outputs are compared with ==.
"""

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import (
    LATENT,
    PER_HEAD,
    SETTINGS,
    SNIPPETS,
    VOCAB,
    RandomDrafter,
    assert_idle,
    drain,
    make_engine,
    random_tree,
    run,
)

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS
from pilotfish.core.cache.slots import Slots
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import NO_NODES, NodeRows, Sampling, SequenceRows
from pilotfish.core.trees.tree import ROOT, TokenTree
from pilotfish.engine.engine import Engine
from pilotfish.engine.sample import Sample
from pilotfish.model.attention import AttentionMetadata, Scoring, dense_tree_attention
from pilotfish.model.cuda.graphs import GraphCache
from pilotfish.model.exactness import unequal_companies
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.kv_copy import DeviceCopier
from pilotfish.model.kv_planes import FP8_CAPABILITY, LayerKV
from pilotfish.model.loading.loader import load_model
from pilotfish.model.logprobs import token_logprobs
from pilotfish.model.sampling import SampleColumns, perturbed
from pilotfish.workers.ahead import AheadWorker

DEVICE = torch.device("cuda")
DTYPES = (torch.float32, torch.bfloat16)
SLOTS = 4096
DRAFTS = ("lm", "ngram", "lm+ngram", "random")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


# -- the kernel


def attention_inputs(rows: int, context: int, heads: tuple[int, int, int], dtype: torch.dtype) -> list[Any]:
    """Arguments of a kernel, without the scoring: a prefix of `context` at random slots, a chain of rows below it."""
    num_heads, kv_heads, head_dim = heads
    torch.manual_seed(0)
    slots = torch.randperm(context + rows, dtype=torch.int32)
    path = torch.zeros(rows, rows, dtype=torch.int32)
    for row in range(rows):
        path[row, : row + 1] = slots[context : context + row + 1]
    index = torch.arange(rows, dtype=torch.int32)
    vectors = [
        *(torch.randn(rows, n, head_dim).to(dtype) for n in (num_heads, kv_heads, kv_heads)),
    ]
    kv = LayerKV(*(torch.randn(context + rows + 1, kv_heads, head_dim).to(DEVICE, dtype) for _ in range(2)))
    indices = [
        *(slots[context:], torch.zeros_like(index), context + index, torch.full_like(index, context)),
        *(path, slots[:context]),
    ]
    return [*(x.to(DEVICE) for x in vectors), kv, AttentionMetadata(*(x.to(DEVICE) for x in indices), longest=context)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(32, 8, 128), (12, 4, 64), (8, 1, 256), (5, 5, 80)], ids=str)
@pytest.mark.parametrize(("rows", "context"), [(1, 1), (64, 256), (16, 5000)])
def test_attention_is_the_reference(rows: int, context: int, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    from pilotfish.model.cuda.triton_attention import triton_tree_attention

    inputs = attention_inputs(rows, context, heads, dtype)
    got, expected = (
        attend(*inputs, Scoring(heads[2] ** -0.5)) for attend in (triton_tree_attention, dense_tree_attention)
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_gives_a_row_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    from pilotfish.model.cuda.triton_attention import triton_tree_attention

    *qkv, kv, metadata = attention_inputs(48, 3000, (32, 8, 128), dtype)
    together = triton_tree_attention(*qkv, kv, metadata, Scoring(0.1))
    for chosen in ([47], [0, 46], list(range(5, 30)), list(range(47, -1, -1))):
        some = triton_tree_attention(*(x[chosen] for x in qkv), kv, metadata.rows(chosen), Scoring(0.1))
        assert torch.equal(some, together[chosen]), f"rows {chosen}"


# -- log-probabilities


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_log_probabilities_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    """Of rows with equal logits too, and whatever other rows are asked for."""
    logits = (torch.randn(40, 5003, generator=torch.Generator().manual_seed(0)) * 4).round().to(dtype)
    rows, tokens = [*range(40)], [row * 7 for row in range(40)]
    got, expected = (token_logprobs(logits.to(device), rows, tokens, 20) for device in (DEVICE, "cpu"))
    for one, other in zip(got, expected, strict=True):
        assert (one.rank, [token for token, _ in one.top]) == (other.rank, [token for token, _ in other.top])
        assert [one.logprob, *(p for _, p in one.top)] == pytest.approx([other.logprob, *(p for _, p in other.top)])
    assert [token_logprobs(logits.to(DEVICE), [row], [row * 7], 20)[0] for row in rows] == got


# -- forwards


class Bench:
    """Executors of one model, with and without graphs, and slots handed out in order."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        model = load_model(directory, dtype, DEVICE, eager=False)
        models = (model, replace(model, recordable=False))
        self.replaying, self.plain = (TorchExecutor(one, SLOTS) for one in models)
        self._slots = iter(range(SLOTS))

    def take(self, count: int) -> Slots:
        return np.array([next(self._slots) for _ in range(count)], np.int32)

    def rows(self, tokens: int, nodes: int, seed: int) -> SequenceRows:
        """A sequence with a random tree, at slots of their own."""
        ids, tree = sequence(tokens, nodes, seed)
        return SequenceRows(0, ids, self.take(tokens), NodeRows.of(tree, self.take(len(tree))), kept=[tokens - 1])


def sequence(tokens: int, nodes: int, seed: int) -> tuple[list[int], TokenTree]:
    """Tokens and a random tree below the last; equal seeds give equal ones."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, VOCAB, tokens).tolist(), random_tree(rng, VOCAB, nodes)


@pytest.fixture(params=PER_HEAD)
def directory(request: pytest.FixtureRequest, tiny_models: dict[str, Path]) -> Path:
    return tiny_models[request.param]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_replay_has_the_bits_of_the_forward(directory: Path, dtype: torch.dtype) -> None:
    bench = Bench(directory, dtype)
    assert isinstance(bench.replaying._forward, GraphCache) == bench.replaying.model.recordable
    for tokens, nodes in ((9, 0), (30, 12), (9, 3), (200, 40), (1, 5)):
        rows = [bench.rows(tokens, nodes, seed=tokens)]
        for _ in range(2):  # recorded, then replayed
            assert torch.equal(bench.replaying.forward(rows), bench.plain.forward(rows)), f"{tokens} and {nodes}"


@pytest.mark.parametrize("children", [0, 4])
@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 0.8}, {"top_p": 0.9, "top_k": 40, "min_p": 1e-3}]
)
def test_a_graph_draws_what_is_drawn_after_a_forward(children: int, params: dict[str, float], llama: Path) -> None:
    bench, index = Bench(llama, torch.float32), np.arange(10)  # whose logits are all distinct
    rows, seeded = bench.rows(9, 9, seed=0), SamplingParams(**{"temperature": 1.0, **params})
    sampling = Sampling(None, [seeded], [7], np.zeros_like(index), index, children=children)
    for _ in range(2):  # recorded, then replayed
        drawn, expected = (each.execute([rows], sampling) for each in (bench.replaying, bench.plain))
        assert np.array_equal(drawn.tokens, expected.tokens) and not len(drawn.broken)
        if children:
            assert np.allclose(drawn.log_chances, expected.log_chances, atol=1e-5)  # type: ignore[arg-type]


def test_ten_million_draws_are_those_of_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """A logarithm may have another last bit; a draw differs where two scores are as close as that."""
    torch.set_num_threads(8)
    count, turns, differing = 50_000, 200, 0
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(0)).expand(count, -1).contiguous()
    on_device, rows = logits.to(DEVICE), np.arange(count)
    sampling = Sampling(None, [SamplingParams(temperature=0.8)] * count, rows.tolist(), rows, rows)
    here, there = (SampleColumns.of(sampling, device) for device in (torch.device("cpu"), DEVICE))
    for _ in range(turns):
        here, there = (replace(each, positions=each.positions + count) for each in (here, there))
        differing += int((perturbed(on_device, there, 1)[1].cpu() != perturbed(logits, here, 1)[1]).sum())
    with capsys.disabled():
        sys.stdout.write(f"\n{differing} of {turns * count:,} draws differ from the CPU's\n")
    assert differing < 10


def test_a_recording_stands_what_other_threads_copy(llama: Path) -> None:
    bench, ended, copied = Bench(llama, torch.float32), threading.Event(), [0]
    copier, slots = DeviceCopier(bench.replaying.kv), np.arange(SLOTS - OBJECT_TOKENS, SLOTS, dtype=np.int32)

    def copy() -> None:
        while not ended.is_set():
            copier.write(slots, copier.read(slots))
            copied[0] += 1

    with ThreadPoolExecutor(1) as pool:
        copying = pool.submit(copy)
        try:
            for nodes in (0, 9, 17, 25, 33, 41):
                rows = [bench.rows(9 + nodes, nodes, seed=nodes)]
                assert torch.equal(bench.replaying.forward(rows), bench.plain.forward(rows))
        finally:
            ended.set()
        copying.result()
    assert copied[0] > 1


def test_logits_are_those_of_the_cpu(directory: Path) -> None:
    bench = Bench(directory, torch.float32)
    rows = [bench.rows(70, 15, seed=0)]
    reference = TorchExecutor(load_model(directory, torch.float32, torch.device("cpu"), eager=True), SLOTS)
    torch.testing.assert_close(bench.plain.forward(rows).cpu(), reference.forward(rows), rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", LATENT)
def test_latents_run_eagerly(kind: str, tiny_models: dict[str, Path]) -> None:
    own, cpu = (load_model(tiny_models[kind], torch.float32, at, eager=True) for at in (DEVICE, torch.device("cpu")))
    rows = SequenceRows(0, [*range(70)], np.arange(70, dtype=np.int32), NO_NODES, range(70))
    ours, theirs = (TorchExecutor(model, SLOTS).forward([rows]).cpu() for model in (own, cpu))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)


def test_the_reference_runs_on_the_device(directory: Path) -> None:
    bench = Bench(directory, torch.float32)
    rows = [bench.rows(70, 15, seed=0)]
    reference = TorchExecutor(load_model(directory, torch.float32, DEVICE, eager=True), SLOTS)
    assert not isinstance(reference._forward, GraphCache)
    torch.testing.assert_close(bench.plain.forward(rows), reference.forward(rows), rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_the_same_bits_in_any_company_and_place(directory: Path, dtype: torch.dtype) -> None:
    bench = Bench(directory, dtype)
    alone = bench.plain.forward([bench.rows(66, 0, seed=0)])[0]
    for count in range(0, 130, 7):
        other = bench.rows(1 + count % 5, count, seed=count)
        mine = bench.rows(66, 0, seed=0)
        assert torch.equal(bench.plain.forward([other, mine])[-1], alone), f"after {other.num_rows} rows"
        mine = bench.rows(66, 0, seed=0)
        assert torch.equal(bench.plain.forward([mine, other])[0], alone), f"before {other.num_rows} rows"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_check_at_start_finds_the_same(directory: Path, dtype: torch.dtype) -> None:
    assert unequal_companies(Bench(directory, dtype).plain) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_node_has_the_bits_that_it_has_alone(directory: Path, dtype: torch.dtype) -> None:
    bench = Bench(directory, dtype)
    ids, tree = sequence(30, 20, seed=1)
    logits = bench.replaying.forward([bench.rows(30, 20, seed=1)])
    for node, row in zip(range(ROOT, len(tree)), logits, strict=True):
        tokens = [*ids, *tree.path_tokens(node)]
        alone = SequenceRows(0, tokens, bench.take(len(tokens)), NO_NODES, kept=[len(tokens) - 1])
        assert torch.equal(bench.replaying.forward([alone])[0], row), f"node {node}"


def test_layers_are_counted_while_a_graph_runs(llama: Path) -> None:
    executor = Bench(llama, torch.float32).replaying
    progress, rows = executor.count_layers(), SequenceRows(0, [1, 2, 3], np.arange(3, dtype=np.int32), NO_NODES, [2])
    for _ in range(2):  # recorded, then replayed
        progress.reset()
        executor.forward([rows])
        torch.cuda.synchronize()
        assert progress.at(0.0) == progress.layers


# -- outputs


@pytest.fixture
def engines(llama: Path, draft: Path) -> Iterator[Any]:
    """Builds engines by drafter and precision; each must free all of its slots."""
    made: list[Engine] = []

    def build(drafter: str | None, dtype: str, **rounded: str) -> Engine:
        config: dict[str, Any] = {"device": str(DEVICE), "dtype": dtype, **rounded}
        if drafter == "random":
            made.append(make_engine(llama, RandomDrafter(VOCAB), **config))
        elif drafter is None:
            made.append(make_engine(llama, **config))
        else:
            made.append(make_engine(llama, mode="sync", drafter=drafter, draft=draft, nodes=16, **config))
        return made[-1]

    yield build
    for engine in made:
        assert_idle(engine)


def params(index: int) -> SamplingParams:
    return SamplingParams(max_tokens=24, seed=index, **SETTINGS[index % len(SETTINGS)])


def outputs(engine: Engine, *, together: bool) -> list[list[int]]:
    each = [params(index) for index in range(len(SNIPPETS))]
    if together:
        return run(engine, SNIPPETS, each)
    return [run(engine, [prompt], [p])[0] for prompt, p in zip(SNIPPETS, each, strict=True)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drafter", DRAFTS)
def test_outputs_are_those_without_a_draft(engines: Any, drafter: str, dtype: str) -> None:
    alone = outputs(engines(None, dtype), together=False)
    engine = engines(drafter, dtype)
    assert outputs(engine, together=False) == alone
    assert outputs(engine, together=True) == alone


def test_outputs_of_forwards_that_run_ahead(engines: Any) -> None:
    """Requests come and go meanwhile; one gets logits that are not finite, and ends alone."""
    engine, plain = engines(None, "bfloat16"), SETTINGS[:4]
    assert isinstance(engine.worker, AheadWorker)
    each = [SamplingParams(max_tokens=24, seed=i, **setting) for i, setting in enumerate(plain)]
    alone = [run(engine, [prompt], [p])[0] for prompt, p in zip(SNIPPETS, each, strict=False)]
    samples = list[Sample]()
    for place, (prompt, p) in enumerate(zip(SNIPPETS, each, strict=False)):
        samples += engine.submit(prompt, p)
        gone = engine.submit(SNIPPETS[place], SamplingParams(max_tokens=200))
        for _ in range(3):
            engine.step()
        engine.abort(gone[0])
    lost = engine.submit("lost", SamplingParams(temperature=0.0, max_tokens=50))[0]
    for _ in range(4):
        engine.step()
    engine.executor._layers[0].keys[lost.request.held.tolist()] = torch.nan
    drain(engine)
    assert lost.finish_reason == "error"
    assert [sample.token_ids for sample in samples] == alone


@pytest.mark.parametrize("rounded", ["kv_dtype", "quantization"])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounded_outputs_are_those_without_a_draft(engines: Any, dtype: str, kind: str, rounded: str) -> None:
    if kind == "fp8" and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        pytest.skip("needs a device with 8-bit floats")
    if (kind, rounded, dtype) == ("fp8", "quantization", "float32"):
        pytest.skip("fp8 weights need bfloat16")
    alone = outputs(engines(None, dtype, **{rounded: kind}), together=False)
    for drafter in ("lm+ngram", "random"):
        assert outputs(engines(drafter, dtype, **{rounded: kind}), together=True) == alone
