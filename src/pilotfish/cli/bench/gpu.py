"""What steps cost on a CUDA GPU beside the time in which their bytes are read; attention and products alone; whether
outputs are equal."""

import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from pilotfish.cli.bench.options import BenchOptions
from pilotfish.cli.bench.plain_decode import PlainDecode
from pilotfish.cli.bench.report import ProgressBar, Report, Row, timed
from pilotfish.cli.pages.document import write_file
from pilotfish.config.fields import Quantization
from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.drafting.drafter import NoDrafter
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.budget import FixedBudget
from pilotfish.core.scheduling.executor import NO_NODES, NodeRows, Sampling, SequenceRows
from pilotfish.core.scheduling.request import Request
from pilotfish.core.scheduling.scheduler import Scheduler
from pilotfish.core.trees.tree import Guesses
from pilotfish.engine.pairs import resolve_pair
from pilotfish.engine.trial import FELL_BACK
from pilotfish.errors import InputError
from pilotfish.model.attention import AttentionMetadata, Scoring
from pilotfish.model.batch import Batch
from pilotfish.model.cuda.graphs import CudaRecorder
from pilotfish.model.devices import kernels_of
from pilotfish.model.draws import Draws
from pilotfish.model.executor import LaunchedForward, TorchExecutor
from pilotfish.model.experts import Affine
from pilotfish.model.kernels import JoinedLinear, Kernels
from pilotfish.model.kv_planes import FP8_CAPABILITY, LayerKV
from pilotfish.model.loading.checkpoint import linear_weights, meta_module
from pilotfish.model.loading.footprint import slot_bytes
from pilotfish.model.loading.loader import LoadedModel, load_model
from pilotfish.model.loading.metadata import GenerationConfig
from pilotfish.model.loading.precision import precision_of
from pilotfish.model.loading.quantize import quantize
from pilotfish.workers.ahead import AheadWorker

T = TypeVar("T")

#: Options of `bench parity` beside bfloat16. All run at a time.
WAYS = (
    *("", "--mode async", "--draft eagle3", "--draft dspark"),
    *("--prefix-cache --kv-host-memory 1", "--prefill-workers 1 --prefill-threshold 64"),
    *("--dtype float16", "--quantization int8", "--quantization fp8 --kv-dtype fp8"),
)
TOGETHER, PARITY_TOKENS, PARITY_SECONDS = 32, 32, 240  # sequences; of each output; until one is given up
VOCAB = 8192  # of shapes that name no other
CONTEXT = 256  # tokens before a step
PROMPT = 1024
ROWS = (1, 8, 16, 64)
REQUESTS, TOKENS = (1, 8, 32), 64  # that are served together, and of each output
CONTEXTS = (1024, 8192, 32768)  # of attention
LEAVES, CHILDREN = 2, 4  # of a draft's level
WARM_UP = 3  # calls
COPY_BYTES = 2**30
SLOTS = PROMPT + max(ROWS)
#: Calls of one measurement, over copies of a weight or of KV that no cache holds together.
CALLS = 40


def run_gpu(options: BenchOptions, progress: ProgressBar) -> Report:
    """Reports medians of `repeats` measurements, then what `bench parity` finds. InputError where there is no CUDA
    device."""
    if not torch.cuda.is_available():
        raise InputError("there is no CUDA device here")
    device, repeats = torch.device("cuda"), options.repeats
    precision = precision_of(options.engine["dtype"], SHAPES["1b"], device, eager=False)
    dtype, shape = precision.dtype, SHAPES["8b"]
    progress.total = 8
    gb_per_s = 2 * COPY_BYTES / (milliseconds(_copy(device), repeats) * 1e6)
    results: dict[str, Any] = {"steps": []}
    for name, each in SHAPES.items():
        model = random_model(each, dtype, device)
        results["steps"] += [{"shape": name, **row} for row in steps(model, gb_per_s, repeats)]
        progress(f"steps of {name}")
    results["idle"] = list(idle(model))
    results["prompts"] = [{"products": "ours", **prompt(model, repeats)}]
    del model
    compiled = [{"rows": rows, "ms": compiled_ms(rows, dtype, device, repeats)} for rows in ROWS]
    progress("compiled")
    library = random_model(shape, dtype, device, with_cublas(device, shape.head_dim))
    results["prompts"] += [{"products": "cuBLAS", **prompt(library, repeats)}]
    del library
    progress("prompts")
    results |= {"compiled": compiled, "eight_bits": eight_bits(shape, dtype, device, repeats)}
    progress("8 bits")
    results["levels"] = levels(dtype, device, repeats)
    results["attention"] = list(attention(shape, dtype, device, gb_per_s, repeats))
    progress("attention")
    results["products"] = list(products(shape, dtype, device, repeats))
    progress("products")
    machine = {"dtype": precision.name, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    results = {**machine, "copy_gb_per_s": gb_per_s, **results}
    if options.out is not None:
        write_file(Report(results).as_json(), options.out, "out")  # what follows may be cut off
    gc.collect()
    torch.cuda.empty_cache()
    found = parity([way for way in WAYS if has_fp8() or "fp8" not in way], options.prompts, str(device))
    progress("parity")
    return Report({**results, "parity": found}, failed=any(row["problem"] for row in found))


def has_fp8() -> bool:
    return torch.cuda.get_device_capability() >= FP8_CAPABILITY


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Median of a call and the wait for the device."""

    def waited() -> None:
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    return 1000 * statistics.median([timed(waited) for _ in range(WARM_UP + repeats)][WARM_UP:])


def microseconds(calls: Callable[[], object], count: int, device: torch.device, repeats: int) -> float:
    """Of one of the `count` calls, replayed as a graph, without launches."""
    replay: Callable[[], object] = calls
    if device.type == "cuda":
        replay = CudaRecorder()(lambda: (calls(), None)[1])
    return 1000 * milliseconds(replay, repeats) / count


def in_turn(call: Callable[[T], object], each: Sequence[T], count: int) -> Callable[[], object]:
    return lambda: [call(each[i % len(each)]) for i in range(count)]


def _copy(device: torch.device) -> Callable[[], object]:
    source, target = (torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    return lambda: target.copy_(source)


# -- steps


def steps(model: LoadedModel, gb_per_s: float, repeats: int) -> Iterator[Row]:
    """Of one token and a tree below it, `rows` together, after `CONTEXT` tokens. `forward_ms` is the device's, with the
    `sampling_ms` of its draws at T = 0.8; a step is from rows to tokens, Python included. The floor reads weights and
    KV once each."""
    executor, kernels = TorchExecutor(model, SLOTS), model.kernels
    for rows in ROWS:
        step = step_rows(executor, rows)
        run = partial(executor.execute, [step], sampling_of(rows))
        spent = milliseconds(run, repeats)
        forward = 1000 * statistics.median(run().seconds.model for _ in range(repeats))
        vocab = model.config.vocab_size
        draws, logits = Draws.of(sampling_of(rows), rows, vocab), torch.randn(rows, vocab)
        assert draws is not None
        draw = partial(kernels.draw, logits.to(model.device, model.dtype), draws.map(lambda x: x.to(model.device)))
        sampling = microseconds(draw, 1, model.device, repeats) / 1000
        read = weight_bytes(model) + (CONTEXT + rows) * slot_bytes(model.config, model.kv_dtype.itemsize)
        floor = read / (gb_per_s * 1e6)
        times = {"floor_ms": floor, "forward_ms": forward, "sampling_ms": sampling, "step_ms": spent}
        yield {"rows": rows, **times, "times_floor": spent / floor}


class WatchedExecutor(TorchExecutor):
    def __init__(self, model: LoadedModel, num_slots: int) -> None:
        super().__init__(model, num_slots)
        self.launched: list[LaunchedForward] = []

    def launch(self, rows: Sequence[SequenceRows], sampling: Sampling) -> LaunchedForward:
        self.launched.append(super().launch(rows, sampling))
        return self.launched[-1]


def idle(model: LoadedModel) -> Iterator[Row]:
    """Between two forwards of `AheadWorker`, without drafts, by the device's clock."""
    kernels = model.kernels
    for requests in REQUESTS:
        executor = WatchedExecutor(model, requests * (CONTEXT + TOKENS))
        scheduler = Scheduler(SlotPool(executor.num_slots), PROMPT, requests)
        worker = AheadWorker(executor, scheduler, NoDrafter(), FixedBudget(0, 0))
        for number in range(requests):
            tokens, params = [1 + number] * CONTEXT, SamplingParams(temperature=0.8, max_tokens=TOKENS)
            scheduler.add(Request(number, tokens, params, number, frozenset(), TOKENS))
        while worker.busy:
            worker.step()
        pairs = [*pairwise(executor.launched)][-TOKENS // 2 :]  # once all prompts are read
        gaps = [1000 * kernels.seconds(after.forwarded.began, before.moments[1]) for before, after in pairs]
        yield {"requests": requests, "idle_ms": statistics.median(gaps)}


def sampling_of(rows: int, children: int = 0) -> Sampling:
    index = np.arange(rows)
    return Sampling(None, [SamplingParams(temperature=0.8)], [7], np.zeros_like(index), index, children=children)


def weight_bytes(model: LoadedModel) -> int:
    """Of products, which are all that a step reads of a model but for rows of its embedding."""
    return sum(weight.numel() for weight in linear_weights(meta_module(model.config))) * model.dtype.itemsize


def prompt(model: LoadedModel, repeats: int) -> Row:
    executor = TorchExecutor(model, SLOTS)
    tokens, slots = [1 + place % (VOCAB - 1) for place in range(PROMPT)], np.arange(PROMPT, dtype=np.int32)
    rows = SequenceRows(0, tokens, slots, NO_NODES, kept=[PROMPT - 1])
    spent = milliseconds(lambda: executor.forward([rows]), repeats)
    operations = 2 * PROMPT * weight_bytes(model) / model.dtype.itemsize
    return {"tokens": PROMPT, "ms": spent, "tflop_per_s": operations / (spent * 1e9)}


def with_cublas(device: torch.device, head_dim: int) -> Kernels:
    """The device's kernels, but for products, which are the library's."""
    kernels = kernels_of(device, head_dim, eager=False)
    kernels.linear = JoinedLinear  # type: ignore[method-assign]
    return kernels


def eight_bits(shape: LlamaConfig, dtype: torch.dtype, device: torch.device, repeats: int) -> list[Row]:

    def forward_ms(kind: Quantization) -> float:
        executor = TorchExecutor(random_model(shape, dtype, device, quantization=kind), SLOTS)
        step = step_rows(executor, 1)
        return milliseconds(lambda: executor.forward([step]), repeats)

    kinds: tuple[Quantization, ...] = ("none", "int8", "fp8") if has_fp8() else ("none", "int8")
    return [{"weights": kind, "rows": 1, "forward_ms": forward_ms(kind)} for kind in kinds]


def levels(dtype: torch.dtype, device: torch.device, repeats: int) -> list[Row]:
    """Of drafts: `LEAVES` rows, and the `CHILDREN` likeliest tokens after each. What `device_ms` leaves of `ms` is the
    host's: several levels at a time without it would save at most that."""
    drafts = {
        "1b": random_model(SHAPES["1b"], dtype, device),
        "bundled": load_model(resolve_pair("pycode").draft, dtype, device, eager=False),
    }
    found = []
    for name, model in drafts.items():
        executor = WatchedExecutor(model, SLOTS)
        level = partial(executor.execute, [step_rows(executor, LEAVES)], sampling_of(LEAVES, CHILDREN))
        row: Row = {"draft": name, "ms": milliseconds(level, repeats)}
        pairs = [(one.moments[1], one.forwarded.began or one.moments[0]) for one in executor.launched[-repeats:]]
        found.append({**row, "device_ms": 1000 * statistics.median(model.kernels.seconds(*pair) for pair in pairs)})
    return found


def compiled_ms(rows: int, dtype: torch.dtype, device: torch.device, repeats: int) -> float:
    step = PlainDecode(SHAPES["8b"], rows, CONTEXT, dtype, device)
    step.layer = torch.compile(step.layer, dynamic=False)
    return microseconds(step, 1, device, repeats) / 1000


# -- attention and products by themselves


def attention(
    shape: LlamaConfig, dtype: torch.dtype, device: torch.device, gb_per_s: float, repeats: int
) -> Iterator[Row]:
    """Of one layer, over a tree of `rows` below so many tokens; the floor reads its KV once."""
    kv_heads, head_dim = shape.num_key_value_heads, shape.head_dim
    for context in CONTEXTS:
        token = 2 * kv_heads * head_dim * dtype.itemsize
        copies = min(CALLS, 1 + (256 << 20) // (token * context))
        plane = partial(torch.randn, context + max(ROWS) + 1, kv_heads, head_dim, dtype=dtype, device=device)
        pools = [LayerKV(plane(), plane()) for _ in range(copies)]
        for rows in ROWS:
            calls = in_turn(attending(shape, context, rows, dtype, device), pools, CALLS)
            spent = microseconds(calls, CALLS, device, repeats)
            yield {"context": context, "rows": rows, "floor_us": context * token / (gb_per_s * 1e3), "us": spent}


def attending(
    shape: LlamaConfig, context: int, rows: int, dtype: torch.dtype, device: torch.device
) -> Callable[[LayerKV], Tensor]:
    kernels = kernels_of(device, shape.head_dim, eager=False)
    [batch] = Batch.build([context_and_tree(rows, VOCAB, context)[1]], kernels.buckets(), context + max(ROWS))
    place: AttentionMetadata = batch.map(lambda tensor: tensor.to(device)).metadata
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    q, k, v = (
        torch.randn(len(place.row_slots), count, shape.head_dim, dtype=dtype, device=device)
        for count in (heads, kv_heads, kv_heads)
    )
    return lambda kv: kernels.attend(q, k, v, kv, place, Scoring(shape.head_dim**-0.5))


def products(shape: LlamaConfig, dtype: torch.dtype, device: torch.device, repeats: int) -> Iterator[Row]:
    """Each over several weights, so that none comes out of a cache."""
    kernels, hidden, inner = kernels_of(device, shape.head_dim, eager=False), shape.hidden_size, shape.intermediate_size
    joined = (shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim
    sizes = {"qkv": (joined, hidden), "o": (hidden, hidden), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    for name, (outputs, inputs) in {**sizes, "head": (shape.vocab_size, hidden)}.items():
        copies = max(2, (256 << 20) // (outputs * inputs * dtype.itemsize))
        weights = [torch.randn(outputs, inputs, dtype=dtype, device=device) for _ in range(copies)]
        ours, library = ([make(Affine(w, None)) for w in weights] for make in (kernels.linear, JoinedLinear))
        for rows in (1, 16, 64, 2 * PROMPT):
            x, turns = torch.randn(rows, inputs, dtype=dtype, device=device), CALLS if rows <= 64 else 4
            calls = (in_turn(partial(_applied, x), each, turns) for each in (ours, library))
            us = [microseconds(call, turns, device, repeats) for call in calls]
            yield {"product": name, "rows": rows, "us": us[0], "cublas_us": us[1], "speed": us[1] / us[0]}


def _applied(x: Tensor, linear: Callable[[Tensor], Tensor]) -> Tensor:
    return linear(x)


# -- outputs


def parity(ways: Sequence[str], prompts: Path, device: str) -> list[Row]:
    """A process for each way. `problem`: what it ended with, unless all outputs are equal and show something."""
    common = ["--pair", "pycode", "--dtype", "bfloat16", "--device", device, "--threads", "4"]
    common += ["--prompts", str(prompts), "--max-tokens", str(PARITY_TOKENS), "--concurrency", str(TOGETHER)]
    with TemporaryDirectory() as name, ExitStack() as stack:
        folders, begun = [Path(name, str(place)) for place in range(len(ways))], list[subprocess.Popen[bytes]]()
        for way, folder in zip(ways, folders, strict=True):
            folder.mkdir()
            command = [sys.executable, "-m", "pilotfish", "bench", "parity", *common, *way.split()]
            error, report = stack.enter_context((folder / "error").open("w")), ["--out", str(folder / "report")]
            begun.append(subprocess.Popen([*command, *report], stdout=subprocess.DEVNULL, stderr=error))
            stack.callback(begun[-1].kill)
        until = time.monotonic() + PARITY_SECONDS
        return [_compared(*each, until) for each in zip(ways, folders, begun, strict=True)]


def _compared(way: str, folder: Path, process: subprocess.Popen[bytes], until: float) -> Row:
    row: Row = {"way": way or "bfloat16"}
    try:
        failed = process.wait(max(until - time.monotonic(), 0.1))
        report = json.loads((folder / "report").read_text())
    except (subprocess.TimeoutExpired, OSError, ValueError) as failure:
        said = (folder / "error").read_text().strip().rpartition("\n")[2]
        return {**row, "problem": said or type(failure).__name__}
    row |= {name: report[name] for name in ("compared", "differing", "from_host", "handed_over", "seconds")}
    unshown = [f"{one['drafter']} shows nothing" for one in report["outcomes"] if one["vacuous"]]
    differ = [f"{one['drafter']} differs at {one['index']}" for one in report["differences"]]
    eager = [line for line in (folder / "error").read_text().splitlines() if FELL_BACK in line]
    problems = [*eager[:1], *differ[:3], *unshown[:3]]
    return {**row, "problem": ", ".join(problems or ["no KV came from elsewhere"]) if failed or eager else ""}


# -- Llamas of known shapes with random weights, whose forwards cost what trained ones do; the rows of a step


def llama(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, head_dim: int = 64, vocab: int = VOCAB
) -> LlamaConfig:
    """Input and output embeddings are two matrices."""
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


#: Of Llama 3.2 1B and Llama 3.1 8B.
SHAPES = {
    "1b": llama(layers=16, hidden=2048, heads=32, kv_heads=8, ffn=8192, vocab=128_256),
    "8b": llama(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, head_dim=128, vocab=128_256),
}


def random_model(
    shape: LlamaConfig,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels | None = None,
    quantization: Quantization = "none",
) -> LoadedModel:
    """Random weights, made on the device."""
    gc.collect()  # an executor holds itself, by its forward
    config, kernels = deepcopy(shape), kernels or kernels_of(device, shape.head_dim, eager=False)
    config.architectures, config.context = [LlamaForCausalLM.__name__], shape.max_position_embeddings
    config._attn_implementation = "pilotfish"
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    if quantization != "none":
        quantize(module, quantization)
    module = kernels.replace(module, config.context, alone=True)
    generation, recordable = GenerationConfig(frozenset(), {}), kernels.records
    return LoadedModel(module, config, config, generation, dtype, dtype, device, kernels, recordable)


def step_rows(executor: TorchExecutor, rows: int) -> SequenceRows:
    before, step = context_and_tree(rows, executor.model.config.vocab_size, CONTEXT)
    executor.forward([before])
    return step


def context_and_tree(rows: int, vocab_size: int, context: int) -> tuple[SequenceRows, SequenceRows]:
    """`context` tokens; then a token and a tree below it, `rows` together. Slots count up from 0."""
    prefix = np.arange(context + 1, dtype=np.int32)
    tokens = [1 + token % (vocab_size - 1) for token in range(context + 1)]
    tree = Guesses()
    for node in range(rows - 1):
        tree.add(node // 4 - 1, (node + 1) % vocab_size, -float(node + 1))
    nodes = NodeRows.of(tree.tree(), np.arange(context + 1, context + rows, dtype=np.int32))
    before = SequenceRows(0, tokens[:context], prefix[:context], NO_NODES, kept=[context - 1])
    return before, SequenceRows(context, tokens[context:], prefix, nodes, kept=[0])
