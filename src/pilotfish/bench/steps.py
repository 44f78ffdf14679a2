"""Cost of a step on the CPU, beside what reading its weights and multiplying with them must cost, and which kernels the
difference goes to. Random weights of known shapes; everything takes turns with probes of memory and of products."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from pilotfish.bench.contestants import every_round, take_turns
from pilotfish.bench.forwards import CONTEXT, WARM_UP, step_rows
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.report import ProgressBar, Report, Row, Spread, matmul_probe, ratios, read_probe, timed
from pilotfish.bench.shapes import SHAPES, TARGETS, VOCAB, multiplied_weights, random_model
from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import DType, available_cores
from pilotfish.core.drafting.drafter import DraftLimits
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import SequenceRows
from pilotfish.core.scheduling.request import Request
from pilotfish.errors import InputError
from pilotfish.model.cpu.native import load_kernels
from pilotfish.model.cpu.native_modules import FusedRMSNorm, PackedGatedMLP, PackedLinear, PackedWeight, PlainDecoder
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.loading.footprint import slot_bytes
from pilotfish.model.loading.loader import DTYPES, LoadedModel
from pilotfish.model.loading.precision import multiplies_bfloat16, precision_of
from pilotfish.model.loading.quantize import check_quantization
from pilotfish.workers.lm import LMDrafter

STEP_ROWS = (1, 8, 16)
WIDTH = EngineConfig.width  # rows of a draft's level
LEVELS = EngineConfig.levels
NODES = 256  # more than `LEVELS` give: none is pruned, and every level has `WIDTH` rows
SLOTS = CONTEXT + 64
TEMPERATURE = 0.8
DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """The step of one token and a tree below it, `rows` together, after `CONTEXT` tokens."""

    shape: str
    rows: int

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.rows} rows"


PROBE, LEVEL, FORWARD = "probe", "draft's level", "draft's forward"
TIMED = tuple(Case(shape, rows) for shape in TARGETS for rows in STEP_ROWS)
DRAFT = Case("draft", WIDTH)
#: Those whose kernels are timed one by one.
PROFILED = (*(Case(shape, rows) for shape in TARGETS for rows in (1, 16)), DRAFT)


def run_steps(options: BenchOptions, progress: ProgressBar) -> Report:
    """Runs `repeats` rounds after those to warm up. InputError where the C++ kernels do not build."""
    if not load_kernels():
        raise InputError("bench steps: the C++ kernels are needed, and no compiler here builds them")
    quantization = options.engine["quantization"]
    precision = precision_of(options.engine["dtype"], SHAPES["draft"], DEVICE, eager=False)
    product = product_of(precision.name if precision.name in product_dtypes() else "float32")
    check_quantization(quantization, precision.dtype, DEVICE)
    torch.set_num_threads(options.engine["threads"] or available_cores())
    models = {name: random_model(shape, precision.dtype, DEVICE, quantization) for name, shape in SHAPES.items()}
    calls = calls_of({name: TorchExecutor(model, SLOTS) for name, model in models.items()})
    progress.total = (WARM_UP + options.repeats) * len(calls)
    times = take_turns(calls, range(WARM_UP + options.repeats), WARM_UP, progress)
    reads = {case: bytes_read(models[case.shape], CONTEXT + case.rows) for case in (*TIMED, *PROFILED)}
    results = {
        "dtype": precision.name,
        "context": CONTEXT,
        "read_gb_per_s": Spread.of(times[PROBE]),  # of the probe, once a round
        "gflop_per_s": {name: Spread.of(times[product_of(name)]) for name in product_dtypes()},
        "forwards": [
            forward_time(case, sum(reads[case].values()), multiplied_weights(SHAPES[case.shape]), product, times)
            for case in TIMED
        ],
        "draft": {"rows": WIDTH, "forward_ms": _median_ms(times[FORWARD]), "level_ms": _median_ms(times[LEVEL])},
        "kernels": [row for case in PROFILED for row in kernel_times(case, reads[case], times)],
    }
    return Report(results)


def calls_of(executors: Mapping[str, TorchExecutor]) -> dict[str, Callable[[object], Any]]:
    """What is measured. The draft's calls follow one another, as its levels do in service: its weights stay in the
    cache. A level is the draft's forward inside LMDrafter, with leaves chosen, noise, children hung."""
    steps = {case: step_rows(executors[case.shape], case.rows) for case in (*TIMED, *PROFILED)}
    forwards = {case: partial(executors[case.shape].forward, [step]) for case, step in steps.items()}
    executor = TorchExecutor(executors[DRAFT.shape].model, SLOTS, vocab_size=VOCAB)
    calls: dict[str, Callable[[], Any]] = {
        PROBE: read_probe(),
        **{product_of(name): matmul_probe(DTYPES[name]) for name in product_dtypes()},
        **{case.name: partial(timed, forwards[case]) for case in TIMED},
        LEVEL: partial(level_seconds, LMDrafter(executor, WIDTH, prefix_cache=False)),
        FORWARD: lambda: timed(lambda: [forwards[DRAFT]() for _ in range(LEVELS)]) / LEVELS,
        **{
            kernels_of(case): partial(kernel_seconds, executors[case.shape], steps[case]) for case in reversed(PROFILED)
        },
    }
    return {name: every_round(call) for name, call in calls.items()}


def product_dtypes() -> list[DType]:
    """Those of the products that are probed: bfloat16 only where the processor has instructions for it, or one product
    would take minutes."""
    return ["float32", "bfloat16"] if multiplies_bfloat16(DEVICE) else ["float32"]


def product_of(dtype: DType) -> str:
    return f"{dtype} product"


def kernels_of(case: Case) -> str:
    return f"kernels of {case.name}"


def level_seconds(drafter: LMDrafter) -> float:
    """Seconds of a level: those that `LEVELS` take beyond the first, which has only the last token's row."""
    params = SamplingParams(temperature=TEMPERATURE, max_tokens=CONTEXT)
    request = Request(0, range(1, CONTEXT), params, 0, frozenset(), CONTEXT)
    _propose(drafter, request, 1)  # the prompt's KV
    first, all_levels = (_propose(drafter, request, levels) for levels in (1, LEVELS))
    drafter.close(request)
    return (all_levels - first) / (LEVELS - 1)


def _propose(drafter: LMDrafter, request: Request, levels: int) -> float:
    """Seconds of a tree; then a token that the tree may lack is committed."""
    spent = timed(partial(drafter.propose, [request], DraftLimits(NODES, NODES, levels, price=0.0)))
    drafter.commit(request, request.extend([1]))
    return spent


def forward_time(case: Case, read_bytes: int, weights: int, product: str, times: Mapping[str, Sequence[Any]]) -> Row:
    """Medians of a case; ratios are taken within rounds. A step cannot take less than to read `read_bytes`, nor than to
    multiply each row with `weights` as fast as the `product` of large matrices: `over_floor` is over the larger."""
    own, one_row = times[case.name], times[Case(case.shape, 1).name]
    read, multiply = _floor(read_bytes, times), [2 * weights * case.rows / (speed * 1e9) for speed in times[product]]
    return {
        "shape": case.shape,
        "rows": case.rows,
        "milliseconds": _median_ms(own),
        "of_one_row": ratios(own, one_row).median,
        "read_bytes": read_bytes,  # weights and KV, each once
        "read_ms": _median_ms(read),
        "multiply_ms": _median_ms(multiply),
        "over_floor": ratios(own, list(map(max, read, multiply))).median,
    }


def _floor(read_bytes: int, times: Mapping[str, Sequence[Any]]) -> list[float]:
    """Seconds of reading so much as fast as the probe read, in each round."""
    return [read_bytes / (gb_per_s * 1e9) for gb_per_s in times[PROBE]]


def kernel_times(case: Case, reads: dict[str, int], times: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Medians by `KINDS`; GB/s of those that read weights or KV."""
    rounds = times[kernels_of(case)]
    total = _median_ms([sum(one.values()) for one in rounds])
    rows = []
    for kind in KINDS:
        spent, floor = _median_ms([one[kind] for one in rounds]), _median_ms(_floor(reads[kind], times))
        speed = reads[kind] / (spent * 1e6) if reads[kind] else None
        where: Row = {"shape": case.shape, "rows": case.rows, "kind": kind}
        figures = {"milliseconds": spent, "share": spent / total, "read_bytes": reads[kind], "gb_per_s": speed}
        rows.append({**where, **figures, "floor_ms": floor, "above_floor_ms": spent - floor})
    return rows


def _median_ms(seconds: Sequence[float]) -> float:
    return 1000 * statistics.median(seconds)


# -- kernels

#: Parts of a forward's time: those that the kernels clock (`Part` in decoder.h, in their order); `rows`
#: fills its tensors; `other` is all that is in no kernel: Python, and torch's own operations.
CLOCKED = ("embedding", "norms", "linear", "rotate", "attention", "gated_mlp", "lm_head")
KINDS = (*CLOCKED, "rows", "other")


def kernel_seconds(executor: TorchExecutor, step: SequenceRows) -> dict[str, float]:
    """Seconds of one forward of a plain decoder by `KINDS`."""
    module = cast(PlainDecoder, executor.model.module)
    module.seconds = torch.zeros(len(CLOCKED), dtype=torch.float64)
    began = time.perf_counter()
    batches = executor.prepare([step])
    prepared = time.perf_counter()
    executor.run(batches)
    ended = time.perf_counter()
    seconds = dict(zip(CLOCKED, module.seconds.tolist(), strict=True))
    module.seconds = None
    return {**seconds, "rows": prepared - began, "other": ended - prepared - sum(seconds.values())}


def bytes_read(model: LoadedModel, positions: int) -> dict[str, int]:
    """Bytes that a forward of a Llama reads, once each, by `KINDS`: weights, and KV of so many positions."""
    read = dict.fromkeys(KINDS, 0)
    for name, part in model.module.named_modules():
        if isinstance(part, PackedLinear):
            read["lm_head" if name == "lm_head" else "linear"] += _num_bytes(part.weight)
        elif isinstance(part, PackedGatedMLP):
            read["gated_mlp"] += sum(map(_num_bytes, (part.gate, part.up, part.down)))
        elif isinstance(part, FusedRMSNorm):
            read["norms"] += part.weight.nbytes
    return read | {"attention": kv_bytes(model, positions)}


def kv_bytes(model: LoadedModel, positions: int) -> int:
    return positions * slot_bytes(model.config, model.kv_dtype.itemsize)


def _num_bytes(weight: PackedWeight) -> int:
    return weight.panels.nbytes + (0 if weight.scales is None else weight.scales.nbytes)
