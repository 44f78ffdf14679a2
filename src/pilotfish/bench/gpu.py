"""What a step costs on a CUDA GPU, with and without graphs, and its attention beside other ways to compute it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from pilotfish.bench.machine import timed
from pilotfish.bench.profile import CONTEXT, WARM_UP, context_and_tree
from pilotfish.bench.report import print_table
from pilotfish.bench.shapes import HEAD_DIM, SHAPES, VOCAB, LlamaShape, random_model
from pilotfish.config import DType
from pilotfish.errors import InputError
from pilotfish.model.attention import AttentionMetadata, Scoring, TreeAttention, dense_tree_attention
from pilotfish.model.buckets import EXACT
from pilotfish.model.graphs import CudaRecorder
from pilotfish.model.loader import DTYPES, LoadedModel
from pilotfish.model.runner import Batch, Runner

TARGETS = ("88m", "344m")
ROWS = (1, 8, 16, 64)
SLOTS = CONTEXT + max(ROWS)
CALLS = 50  # of an attention in one measurement
COPY_BYTES = 2**30
SCALE = HEAD_DIM**-0.5


@dataclass(frozen=True)
class StepTime:
    """A step of one token and a tree below it, `rows` together, after `CONTEXT` tokens."""

    shape: str
    rows: int
    graphs: bool
    milliseconds: float
    gb_per_s: float  # weights and KV, each counted once


@dataclass(frozen=True)
class AttentionTime:
    """Microseconds of one layer's attention over such a step's rows; SDPA's alone writes no KV."""

    shape: str
    rows: int
    triton: float
    dense: float
    sdpa: float


@dataclass(frozen=True)
class GpuReport:
    gpu: str
    torch: str
    dtype: DType
    copy_gb_per_s: float  # read and written, by a copy of 1 GiB
    steps: list[StepTime]
    attention: list[AttentionTime]


def cuda_device() -> torch.device:
    """InputError where there is none."""
    if not torch.cuda.is_available():
        raise InputError("bench gpu: there is no CUDA device here")
    return torch.device("cuda")


def run_gpu(
    device: torch.device, dtype: DType, repeats: int, done: Callable[[str], None] = lambda _: None
) -> GpuReport:
    """Medians of `repeats`. `done` is called with each shape's name."""
    steps: list[StepTime] = []
    attention: list[AttentionTime] = []
    for name in TARGETS:
        model = random_model(SHAPES[name], DTYPES[dtype], device)
        for graphs in (False, True):
            runner = Runner(model, SLOTS, graphs=graphs)
            steps += [step_time(runner, name, rows, repeats, graphs=graphs) for rows in ROWS]
        attention += [attention_time(name, rows, model, repeats) for rows in ROWS]
        done(name)
    copied = 2 * COPY_BYTES / (milliseconds(_copy(device), repeats) * 1e6)
    return GpuReport(torch.cuda.get_device_name(), torch.__version__, dtype, copied, steps, attention)


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Median of a call and the wait for the device."""

    def waited() -> None:
        call()
        torch.cuda.synchronize()

    return 1000 * statistics.median([timed(waited) for _ in range(WARM_UP + repeats)][WARM_UP:])


def _copy(device: torch.device) -> Callable[[], object]:
    source, target = (torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: target.copy_(source)


def step_time(runner: Runner, name: str, rows: int, repeats: int, *, graphs: bool) -> StepTime:
    """A forward from its rows to its logits, Python included."""
    before, step = context_and_tree(rows, VOCAB)
    runner.forward([before])
    spent = milliseconds(lambda: runner.forward([step]), repeats)
    read = SHAPES[name].read_bytes(CONTEXT + rows, runner.model.dtype.itemsize)
    return StepTime(name, rows, graphs, spent, read / (spent * 1e6))


def attention_time(name: str, rows: int, model: LoadedModel, repeats: int) -> AttentionTime:
    """Triton and SDPA replayed as graphs, free of launches; the dense reference asks the device for lengths, and is
    timed with its launches."""
    contest = attention_contest(SHAPES[name], rows, model.dtype, model.device)
    record = CudaRecorder()
    triton, sdpa = (record(call)[0] for call in (contest.triton, contest.sdpa))

    def microseconds(call: Callable[[], object]) -> float:
        return 1000 * milliseconds(lambda: [call() for _ in range(CALLS)], repeats) / CALLS

    return AttentionTime(name, rows, *map(microseconds, (triton, contest.dense, sdpa)))


@dataclass(frozen=True)
class AttentionContest:
    """Three ways to attend, over the same keys. Each gives [rows, heads, head_dim]."""

    triton: Callable[[], torch.Tensor]
    dense: Callable[[], torch.Tensor]
    sdpa: Callable[[], torch.Tensor]  # over keys and values laid out in position order beforehand


def attention_contest(shape: LlamaShape, rows: int, dtype: torch.dtype, device: torch.device) -> AttentionContest:
    """A step's rows with random queries, keys and values."""
    from pilotfish.model.triton_attention import triton_tree_attention

    [batch] = Batch.build([context_and_tree(rows, VOCAB)[1]], EXACT, SLOTS)
    place = batch.map(lambda tensor: tensor.to(device)).metadata

    def normal(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, HEAD_DIM, dtype=dtype, device=device)

    q, k, v = (normal(rows, heads) for heads in (shape.heads, shape.kv_heads, shape.kv_heads))
    k_pool, v_pool = (normal(SLOTS + 1, shape.kv_heads) for _ in range(2))

    def attend(kernel: TreeAttention) -> torch.Tensor:
        return kernel(q, k, v, k_pool, v_pool, place, Scoring(SCALE))

    attend(dense_tree_attention)  # writes k and v
    query, keys, values = (
        x.transpose(0, 1)[None].contiguous() for x in (q, *(p[: CONTEXT + rows] for p in (k_pool, v_pool)))
    )
    mask = tree_mask(place)

    def sdpa() -> torch.Tensor:
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=SCALE, enable_gqa=True)
        return attended[0].transpose(0, 1)

    return AttentionContest(lambda: attend(triton_tree_attention), lambda: attend(dense_tree_attention), sdpa)


def tree_mask(place: AttentionMetadata) -> torch.Tensor:
    """Which of the slots 0 to `CONTEXT` + rows - 1 each row sees, where the prefix lies in slots 0 to `CONTEXT`. bool
    [rows, slots]."""
    seen = torch.arange(CONTEXT + len(place.row_slots), device=place.row_slots.device) <= CONTEXT
    seen = seen.repeat(len(place.row_slots), 1)
    lengths = (place.row_positions + 1 - place.row_prefixes).clamp(min=0).tolist()
    for row, length in enumerate(lengths):
        seen[row, place.path_slots[row, :length].long()] = True
    return seen


def print_gpu(report: GpuReport) -> None:
    title = (
        f"a step at context {CONTEXT} on {report.gpu}, {report.dtype}; a copy reaches {report.copy_gb_per_s:.0f} GB/s"
    )
    print_table(title, ("model", "rows", "graphs", "ms", "GB/s", "of copy"), map(_step_row(report), report.steps))
    rows = [(a.shape, a.rows, f"{a.triton:.1f}", f"{a.dense:.1f}", f"{a.sdpa:.1f}") for a in report.attention]
    print_table("attention of one layer, us", ("model", "rows", "triton", "dense", "SDPA"), rows)


def _step_row(report: GpuReport) -> Callable[[StepTime], Sequence[object]]:
    return lambda step: (
        step.shape,
        step.rows,
        "yes" if step.graphs else "no",
        f"{step.milliseconds:.3f}",
        f"{step.gb_per_s:.0f}",
        f"{step.gb_per_s / report.copy_gb_per_s:.0%}",
    )
