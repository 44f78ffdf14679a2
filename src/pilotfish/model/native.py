"""The C++ kernels: built once a machine with its own compiler, then cached.

They are `torch.ops.pilotfish`, documented in `kernels.cpp`; `native_modules` runs models on them. The references are
transformers' own modules, `attention.dense_tree_attention`, `sampling.filtered_reference` and
`sampling.perturbed_topk_reference`.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_LIBRARY = "pilotfish_kernels"
_SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = ["-O3", "-fopenmp", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
#: oneDNN's sets of instructions that have none for products of bfloat16, or convert it only.
_WITHOUT_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
PANEL = 32  # kPanel in kernels.cpp


def processor_type() -> str:
    """The compiler's name of the processor that kernels are compiled for: $PILOTFISH_MARCH, else this machine's own.
    `x86-64-v3` is every processor with AVX2."""
    return os.environ.get("PILOTFISH_MARCH") or "native"


@functools.cache
def load_kernels() -> bool:
    """Build (under a minute, once, in $PILOTFISH_CACHE or the user's cache) and load the kernels. False, with one
    logged line, where that fails."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        logger.warning("no C++ compiler (%s): slower reference kernels are used", compiler)
        return False
    cache = Path(os.environ.get("PILOTFISH_CACHE") or Path.home() / ".cache" / "pilotfish")
    directory = cache / "kernels" / _digest()
    try:
        if (library := directory / f"{_LIBRARY}.so").exists():
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        else:
            _build_and_load(directory)
    except (RuntimeError, OSError) as error:
        logger.warning("kernels do not build (%s): slower reference kernels are used", str(error).splitlines()[0])
        return False
    return True


def _build_and_load(directory: Path) -> None:
    """Each process builds in a directory of its own and moves the result to `directory`: a build lock that is shared
    would stay behind when its owner is killed."""
    from torch.utils import cpp_extension

    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=directory) as build:
        flags = [*_FLAGS, f"-march={processor_type()}"]
        cpp_extension.load(_LIBRARY, [str(_SOURCE)], extra_cflags=flags, build_directory=build, is_python_module=False)
        built = Path(build, f"{_LIBRARY}.so")
        built.replace(directory / built.name)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether PyTorch has instructions for products of bfloat16 there. Without them its products take a hundred times
    as long as those of float32; our kernels, which widen to float32, do not. On a CPU oneDNN multiplies for PyTorch,
    and leaves the instructions that its own variable forbids; $ATEN_CPU_CAPABILITY changes nothing of it."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    has_instructions = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    return has_instructions and limit.upper() not in _WITHOUT_BFLOAT16


def _digest() -> str:
    """Names a build: the source, the flags, the torch it links to and the processor it is tuned for."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    features = next((line for line in lines if line.startswith("flags")), "")
    parts = (_SOURCE.read_text(), " ".join(_FLAGS), processor_type(), torch.__version__, features)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def pack_weight(weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[N, K] -> [ceil(N / 32), ceil(K / step), 32, step], the layout that `linear` reads (see kernels.cpp): a
    step is 1 input in float32 and 2 in bfloat16. `dtype` is the inputs', where it is not the weight's."""
    outputs, depth = weight.shape
    step = 2 if (dtype or weight.dtype) == torch.bfloat16 else 1
    padded = torch.nn.functional.pad(weight, (0, -depth % step, 0, -outputs % PANEL))
    return padded.view(-1, PANEL, padded.shape[1] // step, step).transpose(1, 2).contiguous()
