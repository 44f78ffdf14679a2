"""Where the time of a forward goes, kernel by kernel, and what each kernel reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch

from pilotfish.core.executor import SequenceRows
from pilotfish.model.loader import LoadedModel
from pilotfish.model.native_modules import FusedRMSNorm, PackedGatedMLP, PackedLinear, PackedWeight
from pilotfish.model.runner import Runner

#: Ops of torch.ops.pilotfish by what they are here; `linear` gives the output embedding's product too.
OPS = {
    "linear": "linear",
    "gated_mlp": "gated_mlp",
    "tree_attention": "attention",
    "rms_norm": "norms",
    "add_rms_norm": "norms",
    "rotate": "rotate",
}
#: What a forward's time is divided into. `rows` fills its tensors; `other` is all that is in no kernel: Python, and
#: torch's own operations.
KINDS = ("linear", "gated_mlp", "lm_head", "attention", "norms", "rotate", "embedding", "rows", "other")


def kernel_seconds(runner: Runner, step: SequenceRows) -> dict[str, float]:
    """Seconds of one forward of a Llama by `KINDS`. The clocks around its kernels count as `other`."""
    with _clocked_kernels(runner.model.shape.vocab_size) as seconds:
        began = time.perf_counter()
        batches = runner.prepare([step])
        prepared = time.perf_counter()
        runner.run(batches)
        ended = time.perf_counter()
    seconds["rows"] = prepared - began
    seconds["other"] = ended - began - sum(seconds.values())
    return seconds


@contextmanager
def _clocked_kernels(vocab_size: int) -> Iterator[dict[str, float]]:
    """What kernels take meanwhile, by `KINDS`: they are replaced by calls of themselves between two clocks. A product
    of `vocab_size` outputs is the output embedding's."""
    seconds = dict.fromkeys(KINDS, 0.0)

    def clocked(call: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            began = time.perf_counter()
            result = call(*args)
            spent = time.perf_counter() - began
            seconds["lm_head" if kind == "linear" and args[2] == vocab_size else kind] += spent
            return result

        return run

    kernels = [(torch.ops.pilotfish, op, kind) for op, kind in OPS.items()]
    with ExitStack() as stack:
        for owner, name, kind in (*kernels, (torch.nn.functional, "embedding", "embedding")):
            stack.enter_context(mock.patch.object(owner, name, clocked(getattr(owner, name), kind)))
        yield seconds


def bytes_read(model: LoadedModel, positions: int) -> dict[str, int]:
    """What a forward of a Llama reads, once each, by `KINDS`: weights, and KV of so many positions."""
    read = dict.fromkeys(KINDS, 0)
    for name, part in model.module.named_modules():
        if isinstance(part, PackedLinear):
            read["lm_head" if name == "lm_head" else "linear"] += _num_bytes(part.weight)
        elif isinstance(part, PackedGatedMLP):
            read["gated_mlp"] += sum(map(_num_bytes, (part.gate, part.up, part.down)))
        elif isinstance(part, FusedRMSNorm):
            read["norms"] += part.weight.nbytes
    shape = model.shape
    read["attention"] = shape.layers * positions * 2 * shape.kv_heads * shape.head_dim * model.dtype.itemsize
    return read


def _num_bytes(weight: PackedWeight) -> int:
    return weight.panels.nbytes + (0 if weight.scales is None else weight.scales.nbytes)
