"""The bench of steps, on tiny shapes; no test says how fast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import Measure
from typer.testing import CliRunner

from pilotfish.bench import app, steps
from pilotfish.bench.forwards import CONTEXT, WARM_UP, step_rows
from pilotfish.bench.shapes import HEAD_DIM, SHAPES, VOCAB, llama, multiplied_weights, random_model
from pilotfish.bench.steps import (
    KINDS,
    LEVELS,
    PROBE,
    PROFILED,
    SLOTS,
    TIMED,
    WIDTH,
    Case,
    bytes_read,
    forward_time,
    kernel_seconds,
    kernel_times,
    level_seconds,
    run_steps,
)
from pilotfish.core.scheduling.executor import Outcome, Sampling, SequenceRows
from pilotfish.errors import InputError
from pilotfish.model.cpu.native import load_kernels
from pilotfish.model.executor import TorchExecutor
from pilotfish.workers.lm import LMDrafter

CPU = torch.device("cpu")
TINY = llama(layers=2, hidden=64, heads=2, kv_heads=1, ffn=96)


def read_bytes(positions: int, element_size: int) -> int:
    """Bytes that a step of TINY must read: weights less the input embedding, and KV of so many positions."""
    hidden, heads, kv_heads = TINY.hidden_size, TINY.num_attention_heads, TINY.num_key_value_heads
    attention, kv = 2 * hidden * HEAD_DIM * (heads + kv_heads), 2 * kv_heads * HEAD_DIM * positions
    layer = attention + 3 * hidden * TINY.intermediate_size + 2 * hidden + kv
    return element_size * (TINY.num_hidden_layers * layer + hidden + VOCAB * hidden)


needs_kernels = pytest.mark.skipif(not load_kernels(), reason="no C++ compiler")


@pytest.fixture
def tiny_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SHAPES:
        monkeypatch.setitem(SHAPES, name, TINY)
    monkeypatch.setattr(steps, "read_probe", lambda: lambda: 10.0)
    monkeypatch.setattr(steps, "matmul_probe", lambda dtype: lambda: 100.0 * (4 / dtype.itemsize))


@needs_kernels
@pytest.mark.usefixtures("tiny_shapes")
def test_steps(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "multiplies_bfloat16", lambda _: True)
    results = measure(run_steps, "steps", dtype="bfloat16", repeats=2, threads=1).results
    assert [(row["shape"], row["rows"]) for row in results["forwards"]] == [(case.shape, case.rows) for case in TIMED]
    for row in results["forwards"]:
        assert row["read_bytes"] == read_bytes(CONTEXT + row["rows"], 2)
        assert row["read_ms"] == pytest.approx(row["read_bytes"] / 10.0 / 1e6)
        assert row["multiply_ms"] == pytest.approx(2 * multiplied_weights(TINY) * row["rows"] / 200.0 / 1e6)
        assert row["milliseconds"] > 0 and (row["of_one_row"] == 1) == (row["rows"] == 1)
    assert {name: speed.median for name, speed in results["gflop_per_s"].items()} == {"float32": 100, "bfloat16": 200}
    kernels = [(case.shape, case.rows, kind) for case in PROFILED for kind in KINDS]
    assert [(row["shape"], row["rows"], row["kind"]) for row in results["kernels"]] == kernels
    assert all(row["milliseconds"] > 0 for row in results["kernels"])
    assert results["draft"]["rows"] == WIDTH and results["draft"]["forward_ms"] > 0
    assert results["read_gb_per_s"].count == 2 and WARM_UP > 0


@needs_kernels
@pytest.mark.usefixtures("tiny_shapes")
def test_command(tmp_path: Path) -> None:
    out = tmp_path / "steps.json"
    arguments = ["--repeats", "1", "--threads", "1", "--quantization", "int8", "--dtype", "float32", "--json"]
    result = CliRunner().invoke(app, ["steps", *arguments, "--out", str(out)])
    assert result.exit_code == 0 and json.loads(result.stdout) == json.loads(out.read_text())
    report = json.loads(result.stdout)
    assert (report["dtype"], report["quantization"], report["machine"]["threads"]) == ("float32", "int8", 1)


@pytest.mark.parametrize("arguments", [["--dtype", "int8"], ["--quantization", "int4"], ["--quantization", "fp8"]])
def test_bad_usage(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["steps", *arguments])
    assert isinstance(result.exception, InputError) and "\n" not in str(result.exception)


def test_it_is_refused_without_kernels(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "load_kernels", lambda: False)
    with pytest.raises(InputError, match="kernels"):
        measure(run_steps, "steps")


@needs_kernels
@pytest.mark.usefixtures("tiny_shapes")
def test_no_bfloat16_product_is_probed_on_a_processor_without_its_instructions(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "multiplies_bfloat16", lambda _: False)
    results = measure(run_steps, "steps", dtype="bfloat16", repeats=1, threads=1).results
    assert list(results["gflop_per_s"]) == ["float32"]
    row = results["forwards"][0]
    assert row["multiply_ms"] == pytest.approx(2 * multiplied_weights(TINY) / 100.0 / 1e6)


def test_ratios_are_taken_within_rounds() -> None:
    """Medians of ratios, which are not ratios of medians."""
    one, many = Case("88m", 1), Case("88m", 16)
    kernels = [dict.fromkeys(KINDS, 0.0) | {"linear": 0.5}] * 3
    products = {"float32 product": [2.0, 0.5, 0.25]}  # GFLOP/s
    times = {PROBE: [1.0, 2.0, 4.0], **products, one.name: [1.0, 4.0, 1.0], many.name: [2.0, 4.0, 8.0]}
    rounds = {**times, f"kernels of {many.name}": kernels}
    time = forward_time(many, 10**9, 10**9 // 32, "float32 product", rounds)  # a GFLOP in 16 rows
    assert (time["milliseconds"], time["of_one_row"]) == (4000.0, 2.0)
    assert (time["read_ms"], time["multiply_ms"]) == (500.0, 2000.0)
    assert time["over_floor"] == 2.0  # of 2/1, where reading takes longer, 4/2 and 8/4
    rows = kernel_times(many, dict.fromkeys(KINDS, 0) | {"linear": 10**9}, rounds)
    linear, mlp = (next(row for row in rows if row["kind"] == kind) for kind in ("linear", "gated_mlp"))
    assert (linear["milliseconds"], linear["gb_per_s"], linear["floor_ms"], linear["share"]) == (500.0, 2.0, 500.0, 1.0)
    assert mlp["gb_per_s"] is None


def test_weights_that_are_multiplied() -> None:
    hidden, heads, kv_heads = TINY.hidden_size, TINY.num_attention_heads, TINY.num_key_value_heads
    layer = 2 * hidden * HEAD_DIM * (heads + kv_heads) + 3 * hidden * TINY.intermediate_size
    assert multiplied_weights(TINY) == TINY.num_hidden_layers * layer + VOCAB * hidden


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read(dtype: torch.dtype) -> None:
    """By kind it adds up to the shape's; int8 weights are bytes, with a float32 scale for each output."""
    layers, hidden, ffn = TINY.num_hidden_layers, TINY.hidden_size, TINY.intermediate_size
    plain, int8 = (bytes_read(random_model(TINY, dtype, CPU, quantization=q), 7) for q in ("none", "int8"))
    assert sum(plain.values()) == read_bytes(7, dtype.itemsize)
    assert plain["lm_head"] == dtype.itemsize * VOCAB * hidden
    assert int8["lm_head"] == (hidden + 4) * VOCAB
    assert int8["gated_mlp"] == layers * (3 * hidden * ffn + 4 * (2 * ffn + hidden))
    assert {kind: int8[kind] for kind in ("attention", "norms")} == {
        kind: plain[kind] for kind in ("attention", "norms")
    }


@needs_kernels
def test_clocks_change_nothing_and_go_away() -> None:
    executor = TorchExecutor(random_model(TINY, torch.float32, CPU), 300)
    step = step_rows(executor, 5)
    logits, kept = executor.forward([step]), []
    run = executor.run
    executor.run = lambda batches: kept.append(run(batches))  # type: ignore[method-assign,assign,func-returns-value]
    seconds = kernel_seconds(executor, step)
    assert torch.equal(kept[0], logits)
    assert all(spent > 0 for spent in seconds.values()) and tuple(seconds) == KINDS
    assert executor.model.module.seconds is None


@needs_kernels
def test_every_level_of_the_draft_has_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = TorchExecutor(random_model(TINY, torch.float32, CPU), SLOTS, vocab_size=VOCAB)
    drafter = LMDrafter(executor, WIDTH, prefix_cache=False)
    rows: list[int] = []
    execute = executor.execute

    def counted(sequences: list[SequenceRows], sampling: Sampling) -> Outcome:
        rows.append(sum(one.num_rows for one in sequences))
        return execute(sequences, sampling)

    monkeypatch.setattr(executor, "execute", counted)
    level_seconds(drafter)
    assert rows == [CONTEXT - 1, 1, 1, *[WIDTH] * (LEVELS - 1)]
    drafter.table.check()
    assert drafter.table.pool.num_free == drafter.table.pool.capacity
    assert drafter.width == WIDTH
