"""Cost of a step on a CUDA GPU, with and without graphs, and its attention beside other ways to compute it."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from pilotfish.cli.bench.options import BenchOptions
from pilotfish.cli.bench.report import ProgressBar, Report, Row, timed
from pilotfish.core.scheduling.executor import NO_NODES, NodeRows, SequenceRows
from pilotfish.core.trees.tree import Guesses
from pilotfish.errors import InputError
from pilotfish.model.attention import AttentionMetadata, Scoring, TreeAttention, dense_tree_attention, key_slots
from pilotfish.model.batch import EXACT, Batch
from pilotfish.model.cuda.graphs import CudaRecorder
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.kv_planes import LayerKV
from pilotfish.model.loading.footprint import slot_bytes
from pilotfish.model.loading.loader import LoadedModel, load_model
from pilotfish.model.loading.precision import precision_of

VOCAB = 8192
HEAD_DIM = 64
CONTEXT = 256  # tokens before a step
ROWS = (1, 8, 16, 64)
WARM_UP = 3  # forwards
SLOTS = CONTEXT + max(ROWS)
CALLS = 50  # of an attention in one measurement
COPY_BYTES = 2**30
SCALE = HEAD_DIM**-0.5


def run_gpu(options: BenchOptions, progress: ProgressBar) -> Report:
    """Reports medians of `repeats` measurements. InputError where there is no CUDA device."""
    if not torch.cuda.is_available():
        raise InputError("there is no CUDA device here")
    device, repeats = torch.device("cuda"), options.repeats
    precision = precision_of(options.engine["dtype"], SHAPES["88m"], device, eager=False)
    progress.total, steps, attention = len(SHAPES), list[Row](), list[Row]()
    for name, shape in SHAPES.items():
        model = random_model(shape, precision.dtype, device)
        for graphs in (False, True):
            executor = TorchExecutor(replace(model, recordable=graphs and model.recordable), SLOTS)
            steps += [{"shape": name, "graphs": graphs, **step_time(executor, rows, repeats)} for rows in ROWS]
        attention += [{"shape": name, "rows": rows, **attention_us(shape, rows, model, repeats)} for rows in ROWS]
        progress(name)
    source, copy = (torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    copied = 2 * COPY_BYTES / (milliseconds(lambda: copy.copy_(source), repeats) * 1e6)
    machine = {"dtype": precision.name, "gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    return Report({**machine, "copy_gb_per_s": copied, "steps": steps, "attention": attention})


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Median of a call and the wait for the device."""

    def waited() -> None:
        call()
        torch.cuda.synchronize()

    return 1000 * statistics.median([timed(waited) for _ in range(WARM_UP + repeats)][WARM_UP:])


def step_time(executor: TorchExecutor, rows: int, repeats: int) -> Row:
    """A step of one token and a tree below it, `rows` together, after `CONTEXT` tokens: a forward from its rows to its
    logits, Python included. GB/s count weights and KV once each."""
    from pilotfish.model.cuda.products import InvariantLinear

    step, model = step_rows(executor, rows), executor.model
    spent = milliseconds(lambda: executor.forward([step]), repeats)
    linears = (module.weight.values for module in model.module.modules() if isinstance(module, InvariantLinear))
    weights = sum(values.nbytes for values in linears)
    read = weights + (CONTEXT + rows) * slot_bytes(model.config, model.kv_dtype.itemsize)
    return {"rows": rows, "milliseconds": spent, "gb_per_s": read / (spent * 1e6)}


def attention_us(shape: LlamaConfig, rows: int, model: LoadedModel, repeats: int) -> Row:
    """Microseconds of one layer's attention over such a step's rows; SDPA's alone writes no KV. Triton and SDPA are
    replayed as graphs, without launches; the dense reference asks the device for lengths, so its launches count."""
    calls = attention_contest(shape, rows, model.dtype, model.device)
    record = CudaRecorder()
    replayed = {kind: record(calls[kind])[0] for kind in ("triton", "sdpa")}

    def microseconds(call: Callable[[], object]) -> float:
        return 1000 * milliseconds(lambda: [call() for _ in range(CALLS)], repeats) / CALLS

    return {kind: microseconds(call) for kind, call in {**calls, **replayed}.items()}


def attention_contest(
    shape: LlamaConfig, rows: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Callable[[], torch.Tensor]]:
    """Three ways to attend with a step's rows, over the same random keys; SDPA's are laid out in position order
    beforehand. Each gives [rows, heads, head_dim]."""
    from pilotfish.model.cuda.triton_attention import triton_tree_attention

    [batch] = Batch.build([context_and_tree(rows, VOCAB)[1]], EXACT, SLOTS)
    place = batch.map(lambda tensor: tensor.to(device)).metadata

    def normal(tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, HEAD_DIM, dtype=dtype, device=device)

    kv_heads = shape.num_key_value_heads
    q, k, v = (normal(rows, heads) for heads in (shape.num_attention_heads, kv_heads, kv_heads))
    kv = LayerKV(*(normal(SLOTS + 1, kv_heads) for _ in range(2)))

    def attend(kernel: TreeAttention) -> torch.Tensor:
        return kernel(q, k, v, kv, place, Scoring(SCALE))

    attend(dense_tree_attention)  # writes k and v
    seen = (q, *(plane[: CONTEXT + rows] for plane in kv))
    query, keys, values = (x.transpose(0, 1)[None].contiguous() for x in seen)
    mask = tree_mask(place)

    def sdpa() -> torch.Tensor:
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=SCALE, enable_gqa=True)
        return attended[0].transpose(0, 1)

    triton, dense = partial(attend, triton_tree_attention), partial(attend, dense_tree_attention)
    return {"triton": triton, "dense": dense, "sdpa": sdpa}


def tree_mask(place: AttentionMetadata) -> torch.Tensor:
    """Tells which of the slots 0 to `CONTEXT` + rows - 1 each row sees. bool [rows, slots]."""
    rows = len(place.row_slots)
    seen = torch.zeros(rows, CONTEXT + rows, dtype=torch.bool, device=place.row_slots.device)
    for row, slots, position in zip(seen, key_slots(place), place.row_positions.tolist(), strict=True):
        row[slots[: position + 1]] = True
    return seen


# -- Llamas of known shapes with random weights, whose forwards cost what trained ones do; the rows of a step


def llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> LlamaConfig:
    """Input and output embeddings are two matrices of `VOCAB` rows."""
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


#: Named by their parameters.
SHAPES = {
    "88m": llama(layers=12, hidden=768, heads=12, kv_heads=4, ffn=2048),
    "344m": llama(layers=24, hidden=1024, heads=16, kv_heads=4, ffn=3584),
}


def random_model(shape: LlamaConfig, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Random weights, loaded as any other model is; they pass through a temporary directory."""
    with tempfile.TemporaryDirectory() as directory:
        write_random_model(shape, dtype, directory)
        return load_model(Path(directory), dtype, device, eager=False)


def write_random_model(shape: LlamaConfig, dtype: torch.dtype, directory: str) -> None:
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    LlamaForCausalLM(shape).to(dtype).save_pretrained(directory)


def step_rows(executor: TorchExecutor, rows: int) -> SequenceRows:
    before, step = context_and_tree(rows, executor.model.config.vocab_size)
    executor.forward([before])
    return step


def context_and_tree(rows: int, vocab_size: int) -> tuple[SequenceRows, SequenceRows]:
    """`CONTEXT` tokens; then a token and a tree below it, `rows` together. Slots count up from 0."""
    prefix = np.arange(CONTEXT + 1, dtype=np.int32)
    prompt = [1 + token % (vocab_size - 1) for token in range(CONTEXT + 1)]
    tree = Guesses()
    for node in range(rows - 1):
        tree.add(node // 4 - 1, (node + 1) % vocab_size, -float(node + 1))
    nodes = NodeRows.of(tree.tree(), np.arange(CONTEXT + 1, CONTEXT + rows, dtype=np.int32))
    before = SequenceRows(0, prompt[:CONTEXT], prefix[:CONTEXT], NO_NODES, kept=[CONTEXT - 1])
    return before, SequenceRows(CONTEXT, prompt[CONTEXT:], prefix, nodes, kept=[0])
