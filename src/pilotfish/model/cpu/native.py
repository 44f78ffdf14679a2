"""The C++ kernels (`torch.ops.pilotfish`)."""

import functools
import hashlib
import importlib.metadata
import logging
import os
import platform
import re
import shutil
from pathlib import Path

import torch
from torch import Tensor

from pilotfish.config.cache import cache_folder, made_once
from pilotfish.errors import ParameterError
from pilotfish.model.grouped import GroupedWeight

logger = logging.getLogger(__name__)

_LIBRARY = "pilotfish_kernels"
_SOURCES = Path(__file__).with_name("kernels")
_FLAGS = [
    *("-std=c++20", "-O3", "-fvisibility=hidden", "-Wno-psabi"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
]
PANEL = 32  # kPanel in kernels/linear.h

_AVX512 = ["-march=x86-64-v4"]
_BF16 = [*_AVX512, "-mavx512bf16"]
#: Compiler flags of each instruction set that kernels are written for, by machine, the best first. The last runs on
#: every such machine.
INSTRUCTION_SETS = {
    "x86_64": {
        "amx": [*_BF16, "-mamx-tile", "-mamx-bf16"],
        "avx512_bf16": _BF16,
        "avx512": _AVX512,
        "avx2": ["-march=x86-64-v3"],
        "portable": ["-march=x86-64"],
    },
    "aarch64": {"neon": ["-march=armv8-a"]},
}
#: Flags by which Linux lists a processor that has them.
_LISTED = {
    "amx": {"amx_tile", "avx512_bf16"},
    "avx512_bf16": {"avx512_bf16"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma"},
    "avx2": {"avx2", "fma"},
}
#: Names one of them instead of the best that the processor has.
FORCED = "PILOTFISH_ISA"


def instruction_set() -> str:
    """The best of this processor, or $PILOTFISH_ISA; ParameterError if the processor lacks that."""
    usable = [name for name in _flags() if _has(name)]
    forced = os.environ.get(FORCED)
    if forced and forced not in usable:
        raise ParameterError(FORCED, forced, f"one of {', '.join(usable)} on this processor")
    return forced or usable[0]


def _flags() -> dict[str, list[str]]:
    machine = {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
    return INSTRUCTION_SETS.get(machine, {"portable": []})


def _has(name: str) -> bool:
    """On Linux a process asks before it uses tiles."""
    return _LISTED.get(name, set()) <= _processor_flags() and (name != "amx" or torch.cpu._init_amx())


@functools.cache
def _processor_flags() -> frozenset[str]:
    listed = Path("/proc/cpuinfo")
    found = re.search(r"^flags\s*:(.*)", listed.read_text(), re.MULTILINE) if listed.is_file() else None
    return frozenset(found[1].split()) if found else frozenset()


def runs_native(head_dim: int, device: torch.device, *, eager: bool) -> bool:
    """Builds the kernels if they are not built yet."""
    return not eager and device.type == "cpu" and head_dim % PANEL == 0 and load_kernels()


def load_kernels() -> bool:
    """Builds (under a minute, once, in $PILOTFISH_CACHE) and loads the kernels, or logs why not. ParameterError as
    `instruction_set`."""
    return _loaded() is not None


@functools.cache
def _loaded() -> Path | None:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        logger.warning("no C++ compiler (%s): slower reference kernels are used", compiler)
        return None
    try:
        library = made_once(cache_folder("kernels") / build_digest() / f"{_LIBRARY}.so", _build)
        if not hasattr(torch.ops.pilotfish, "linear"):  # as it is not where another process has built them
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    except (RuntimeError, OSError) as error:
        logger.warning("kernels do not build (%s): slower reference kernels are used", str(error).splitlines()[0])
        return None
    return library


@functools.cache
def built_by() -> str:
    """The compiler of the loaded kernels, from the library: it decides where products and sums are fused."""
    library = _loaded()
    assert library is not None
    notes = re.findall(rb"(?:GCC: \([^()\0]*\)|clang version) [\w.+~-]+", library.read_bytes())
    return b", ".join(sorted(set(notes))).decode(errors="replace") or "an unknown compiler"


def _build(library: Path) -> None:
    """Each process builds in its own directory: a shared lock would outlive an owner that is killed."""
    from torch.utils import cpp_extension  # slow

    flags, source = [*_FLAGS, *_flags()[instruction_set()]], str(_SOURCES / "ops.cpp")
    place = str(library.parent)
    cpp_extension.load(_LIBRARY, [source], extra_cflags=flags, build_directory=place, is_python_module=False)


def build_digest() -> str:
    sources = [path.read_text() for path in sorted(_SOURCES.iterdir()) if path.suffix in (".h", ".cpp")]
    flags = [*_FLAGS, *_flags()[instruction_set()]]
    return hashlib.sha256("\0".join((*sources, *flags, importlib.metadata.version("torch"))).encode()).hexdigest()[:16]


def step_inputs(dtype: torch.dtype) -> int:
    return 2 if dtype.itemsize == 2 else 1


def input_multiple(dtype: torch.dtype) -> int:
    """The multiple that packed weights are padded to: whole steps, on AMX whole tiles of them."""
    step = step_inputs(dtype)
    return 16 * step if step == 2 and instruction_set() == "amx" else step


def pack_weight(weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[N, K] -> [ceil(N / 32), steps, 32, inputs of a step] (kernels/linear.h). `dtype`: the inputs', by default the
    weight's."""
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % input_multiple(dtype or weight.dtype)))
    return in_panels(padded.view(len(padded), -1, step_inputs(dtype or weight.dtype)))


def pack_codes(weight: GroupedWeight) -> Tensor:
    """In the layouts of kernels/groups.h."""
    if weight.table is None:
        steps = weight.codes.view(torch.int8).view(len(weight), -1, step_inputs(weight.dtype))
        return in_panels(steps).view(weight.codes.dtype)
    codes = weight.codes.view(len(weight), -1, 4).int()
    words = torch.zeros_like(codes[..., 0])
    for byte in range(4):
        words |= (codes[..., byte] & 15) << 4 * byte | codes[..., byte] >> 4 << 16 + 4 * byte
    return in_panels(words)


def in_panels(rows: Tensor) -> Tensor:
    """[N, steps, ...] -> [ceil(N / 32), steps, 32, ...]"""
    padded = torch.cat((rows, rows.new_zeros(-len(rows) % PANEL, *rows.shape[1:])))
    return padded.view(-1, PANEL, *rows.shape[1:]).transpose(1, 2).contiguous()
