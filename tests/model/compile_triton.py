"""Compiles the Triton kernels as `triton_tree_attention` would on a GPU, without one; run by test_triton_attention.

Arguments: which of `KERNELS`. Prints the result for each as JSON. Needs a process in which the interpreter is off.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from pilotfish.model.loading.serving_imports import import_for_serving

import_for_serving()  # takes less time

from pilotfish.model.attention import AttentionMetadata, Scoring  # noqa: E402
from pilotfish.model.cuda import triton_attention, triton_kernels  # noqa: E402
from pilotfish.model.kv_planes import empty_kv  # noqa: E402

CPU = torch.device("cpu")
#: rows, prefix width, path width, and by how much the addresses of indices are off what a GPU likes.
CALLS = ((1, 1, 1, 0), (64, 1024, 8, 0), (3, 17, 1, 1), (64, 5000, 64, 3))


class Launches:
    """Takes the place of a kernel and keeps the arguments that each launch would be compiled for."""

    def __init__(self, kernel: Any, target: GPUTarget) -> None:
        self.kernel, self.target = kernel, target
        self.wanted: dict[str, tuple[Any, Any, Any]] = {}

    def __getitem__(self, grid: object) -> Any:
        backend = make_backend(self.target)
        return lambda *args, **options: self._keep(
            *create_function_from_signature(self.kernel.signature, self.kernel.params, backend)(*args, **options)
        )

    def _keep(self, bound: Any, specialization: Any, options: Any) -> None:
        self.wanted[str((specialization, options))] = bound, specialization, options

    def compiled(self) -> Any:
        """The one binary that serves all launches."""
        [(bound, specialization, options)] = self.wanted.values()
        kinds = enumerate(specialization)
        signature = {name: kind for name, (kind, _) in zip(bound, specialization, strict=True)}
        constants = {(i,): list(bound.values())[i] for i, (kind, _) in kinds if kind == "constexpr"}
        backend = make_backend(self.target)
        hints = {(i,): backend.parse_attr(hint) for i, (_, hint) in enumerate(specialization) if isinstance(hint, str)}
        source = ASTSource(self.kernel, signature, constants, hints)
        chosen = {name: options[name] for name in ("num_warps", "num_stages")}
        return triton.compile(source, target=self.target, options=chosen)


#: Compute capability, and types of queries, of keys and values, and sizes of a head.
KERNELS = (
    (80, torch.float32, torch.float32, 256),
    (80, torch.float32, torch.int8, 256),
    (80, torch.bfloat16, torch.int8, 128),
    (90, torch.bfloat16, torch.bfloat16, 128),
    (90, torch.bfloat16, torch.float8_e4m3fn, 128),
)


def launches(target: GPUTarget, dtype: torch.dtype, stored: torch.dtype, head_dim: int) -> tuple[Launches, Launches]:
    both = Launches(triton_kernels.attend_split, target), Launches(triton_kernels.combine_splits, target)
    triton_attention.attend_split, triton_attention.combine_splits = both
    sinks = torch.zeros(8, dtype=dtype) if dtype == torch.bfloat16 else None
    for rows, prefix, path, off in CALLS:
        index = torch.zeros(rows + off, dtype=torch.int32)[off:]
        q, k, v = (torch.zeros(rows, heads, head_dim, dtype=dtype) for heads in (8, 2, 2))
        [kv] = empty_kv(SimpleNamespace(num_hidden_layers=1, num_key_value_heads=2, head_dim=head_dim), stored, 8, CPU)
        slots = [torch.zeros(rows, width, dtype=torch.int32) for width in (prefix, path)]
        metadata, scoring = AttentionMetadata(*[index] * 4, *slots), Scoring(0.125, 100, 30.0, sinks)
        triton_attention.triton_tree_attention(q, k, v, kv, metadata, scoring)
    return both


def main() -> None:
    results = {}
    for capability, dtype, stored, head_dim in (KERNELS[int(number)] for number in sys.argv[1:]):
        target = GPUTarget("cuda", capability, 32)
        split, combine = (each.compiled() for each in launches(target, dtype, stored, head_dim))
        results[f"{dtype}, {stored}"] = {
            "cubins": bool(split.asm["cubin"]) and bool(combine.asm["cubin"]),
            "shared_bytes": split.metadata.shared,
            "tf32": "tf32" in split.asm["ptx"],
            "tensor_cores": "mma" in split.asm["ptx"],
        }
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
