"""Compiles the Triton kernels as a GPU would have them, without one; run by test_triton_compiled.

Arguments: which of `CASES`. Prints, for each, what its binaries are like, as JSON. Needs a process in which the
interpreter is off.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from pilotfish.model.loading.serving_imports import import_for_serving

import_for_serving()  # takes less time

from triton_launches import LAUNCHED  # noqa: E402

from pilotfish.model.attention import AttentionMetadata, Scoring  # noqa: E402
from pilotfish.model.cuda import decoder, drawing, elementwise, experts, products, triton_attention  # noqa: E402
from pilotfish.model.draws import Draws  # noqa: E402
from pilotfish.model.experts import Affine  # noqa: E402
from pilotfish.model.grouped import GroupedWeight  # noqa: E402
from pilotfish.model.kv_planes import empty_kv  # noqa: E402
from pilotfish.model.rules import Rules  # noqa: E402
from pilotfish.model.sampling import COLUMNS, Filters, SampleColumns  # noqa: E402

CPU = torch.device("cpu")
AMPERE, HOPPER = GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32)
CDNA3 = GPUTarget("hip", "gfx942", 64)
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

    def compiled(self) -> Iterator[Any]:
        """A binary for each set of launches that one serves."""
        backend = make_backend(self.target)
        for bound, specialization, options in self.wanted.values():
            kinds = enumerate(specialization)
            signature = {name: kind for name, (kind, _) in zip(bound, specialization, strict=True)}
            constants = {(i,): list(bound.values())[i] for i, (kind, _) in kinds if kind == "constexpr"}
            hinted = ((i, hint) for i, (_, hint) in enumerate(specialization) if isinstance(hint, str))
            source = ASTSource(
                self.kernel, signature, constants, {(i,): backend.parse_attr(hint) for i, hint in hinted}
            )
            names = ("num_warps", "num_stages", "enable_fp_fusion")
            chosen = {name: options[name] for name in names if name in options}
            yield triton.compile(source, target=self.target, options=chosen)


# -- what is launched


def attention(dtype: torch.dtype, stored: torch.dtype, head_dim: int) -> None:
    sinks = torch.zeros(8, dtype=dtype) if dtype == torch.bfloat16 else None
    for rows, prefix, path, off in CALLS:
        index = torch.zeros(rows + off, dtype=torch.int32)[off:]
        q, k, v = (torch.zeros(rows, heads, head_dim, dtype=dtype) for heads in (8, 2, 2))
        [kv] = empty_kv(SimpleNamespace(num_hidden_layers=1, num_key_value_heads=2, head_dim=head_dim), stored, 8, CPU)
        paths = torch.zeros(rows, path, dtype=torch.int32)
        metadata, scoring = (
            AttentionMetadata(*[index] * 4, paths, index, longest=prefix),
            Scoring(0.125, 100, 30.0, sinks),
        )
        triton_attention.triton_tree_attention(q, k, v, kv, metadata, scoring)


def linear(dtype: torch.dtype, stored: torch.dtype, rows: tuple[int, ...]) -> None:
    """As the queries, keys and values of an 8 B Llama, with 8 bits or a bias."""
    weight: Any = torch.zeros(6144, 4096, dtype=stored)
    if stored != dtype:
        weight = GroupedWeight(weight, torch.ones(6144, 1), dtype)
    layer = products.InvariantLinear(Affine(weight, torch.zeros(6144, dtype=dtype) if stored == dtype else None))
    for count in rows:
        layer(torch.zeros(count, 4096, dtype=dtype))


def row_by_row(dtype: torch.dtype) -> None:
    own = elementwise.InvariantNorm(torch.zeros(4096, dtype=dtype), 1e-5)
    for rows in (1, 3, 64):
        own.of_sum(torch.zeros(rows, 4096, dtype=dtype), torch.zeros(rows, 4096, dtype=dtype))
        joined, angles = torch.zeros(rows, 48, 128, dtype=dtype), torch.zeros(rows, 128, dtype=dtype)
        elementwise.rotated(joined[:, :32], angles, angles, 1)


def between_products(dtype: torch.dtype) -> None:
    """What a plain decoder does there, after few rows and after many; with the head norms and biases of some."""
    weight, bias = torch.zeros(6144, 4096, dtype=dtype), torch.zeros(6144, dtype=dtype)
    heads, gates = products.InvariantLinear(Affine(weight, bias)), products.InvariantLinear(Affine(weight, None))
    norm = SimpleNamespace(weight=torch.zeros(128, dtype=dtype), eps=1e-5)
    attention: Any = SimpleNamespace(joined=heads, heads=32, kv_heads=8, head_dim=128, q_norm=norm, k_norm=norm)
    attention.scoring = Scoring(0.1)
    shape = SimpleNamespace(num_hidden_layers=1, num_key_value_heads=8, head_dim=128)
    [kv], angles = empty_kv(shape, dtype, 8, CPU), torch.zeros(64, 128, dtype=dtype)
    model = SimpleNamespace(cos=angles, sin=angles)
    for rows in (1, 3, 64, 128):
        x, index = torch.zeros(rows, 4096, dtype=dtype), torch.zeros(rows, dtype=torch.int32)
        metadata = AttentionMetadata(*[index] * 4, index[:, None], index, longest=1)
        decoder.TritonDecoder._attended(model, attention, x, metadata, kv)  # type: ignore[arg-type]
        decoder.gated(gates.split_product(x), x)


def mixture(dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    """As gpt-oss's, with fewer experts."""
    gate_up, down = (Affine(torch.zeros(4, *size, dtype=dtype), None) for size in ((5760, 2880), (2880, 2880)))
    for count in rows:
        tiles = experts.Tiles.of(torch.arange(4 * count) % 4, 4)
        experts._grouped(torch.zeros(count, 2880, dtype=dtype), gate_up, tiles, 4)
        experts._grouped(torch.zeros(4 * count, 2880, dtype=dtype), down, tiles, 1)


def draw() -> None:
    for rows, columns in ((1, 128_256), (3, 128_256), (64, 128_256)):
        index, filters = torch.zeros(rows, dtype=torch.int64), Filters(min_p=True, top_k=9, top_p=True)
        given = SampleColumns(*[index.double()[:, None]] * 3, index[:, None], *[index] * 3, filters)
        drawing.noisy_best(torch.zeros(rows, columns, dtype=FLOAT32), given, 4)
        drawing.noisy_best(torch.zeros(rows, columns, dtype=torch.float64), given, 4)
        tables = torch.zeros(2, 16, dtype=torch.int64), torch.zeros(rows, 4008, dtype=torch.int32)
        for named, bits, added in ((index, None, None), (None, tables[1], tables[0]), (index, tables[1], tables[0])):
            penalized = None if added is None else (added, index.expand(2, -1), index[:, None], added)
            rules = Rules(bits, added, *(penalized or ()), longest=16)
            draws = Draws(torch.zeros(COLUMNS, rows, dtype=torch.int64), filters, 0, False, named, rules)
            drawing.edited(torch.zeros(rows, columns, dtype=torch.bfloat16), draws)


KERNELS = [(module, name, getattr(module, name)) for module, names in LAUNCHED.items() for name in names]
BFLOAT16, INT8, FP8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
FLOAT32 = torch.float32
#: A case is one of these, " on " and a card.
CASES: dict[str, Callable[[], None]] = {
    "attention, float32": partial(attention, FLOAT32, FLOAT32, 256),
    "attention, float32 over int8": partial(attention, FLOAT32, INT8, 256),
    "attention, bfloat16 over int8": partial(attention, BFLOAT16, INT8, 128),
    "attention, bfloat16": partial(attention, BFLOAT16, BFLOAT16, 128),
    "attention, bfloat16 over fp8": partial(attention, BFLOAT16, FP8, 128),
    "products": partial(linear, BFLOAT16, BFLOAT16, (1, 64, 256)),
    "products with fp8": partial(linear, BFLOAT16, FP8, (1, 64, 256)),
    "products with int8": partial(linear, BFLOAT16, INT8, (1, 64, 256)),
    "products in float16": partial(linear, torch.float16, torch.float16, (1, 64, 256)),
    "products in float32": partial(linear, FLOAT32, FLOAT32, (1, 256)),
    "norms and rotations": partial(row_by_row, BFLOAT16),
    "drawing": draw,
    "experts": partial(mixture, BFLOAT16, (1, 64)),
    "between products": partial(between_products, BFLOAT16),
}
CARDS = {"Ampere": AMPERE, "Hopper": HOPPER, "CDNA3": CDNA3}


def compiled(case: str) -> Iterator[dict[str, Any]]:
    launch, _, card = case.rpartition(" on ")
    target = CARDS[card]
    launched = {name: Launches(kernel, target) for _, name, kernel in KERNELS}
    for module, name, _ in KERNELS:
        setattr(module, name, launched[name])
    products.STAGES, products.TILE = 2 if target.backend == "hip" else 3, 128 if target is HOPPER else 64
    CASES[launch]()
    for name, launches in launched.items():
        for binary in launches.compiled():
            text = binary.asm.get("ptx", "") or binary.asm["amdgcn"]
            yield {
                "kernel": name,
                "shared_bytes": binary.metadata.shared,
                "spilled_bytes": spilled(text, target),
                "matrix_unit": re.findall(r"wgmma\.mma|mma\.sync|mfma", text)[:1],
                "tf32": "tf32" in text,
                "fused": "fma" in text,
            }


def spilled(text: str, target: GPUTarget) -> int:
    if target.backend == "hip":
        return sum(map(int, re.findall(r"vgpr_spill_count:\s+(\d+)", text)))  # scalars go to vectors, not to memory
    with tempfile.TemporaryDirectory() as directory:
        (source := Path(directory) / "kernel.ptx").write_text(text)
        card = f"--gpu-name=sm_{target.arch}{'a' if target.arch >= 90 else ''}"
        command = [triton.knobs.nvidia.ptxas.path, "-v", card, source, "-o", source.with_suffix(".cubin")]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return sum(map(int, re.findall(r"(\d+) bytes spill", told)))


def main() -> None:
    json.dump({name: list(compiled(name)) for name in sys.argv[1:]}, sys.stdout)


if __name__ == "__main__":
    main()
