"""The machine that figures were measured on."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from pilotfish.config import DType, available_cores
from pilotfish.model.loader import DTYPES
from pilotfish.model.native import multiplies_bfloat16

TRIALS = 5
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Machine:
    """Processor, libraries, and the speed of two simple operations with the threads of the run."""

    cpu: str
    cores: int
    threads: int
    torch: str
    transformers: str
    read_gb_per_s: float
    matmul_gflop_per_s: float
    matmul_dtype: str


def describe_machine(dtype: DType) -> Machine:
    """Probes read 512 MiB and multiply two matrices of 2048 by 2048 in `dtype`; in float32 where the processor has no
    bfloat16 instructions, whose emulation would take minutes and say nothing about our kernels."""
    import transformers

    read = read_probe()
    product: DType = dtype if multiplies_bfloat16(torch.device("cpu")) else "float32"
    return Machine(
        cpu=cpu_name(),
        cores=available_cores(),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        read_gb_per_s=max(read() for _ in range(TRIALS)),
        matmul_gflop_per_s=matmul_probe(DTYPES[product]),
        matmul_dtype=product,
    )


def cpu_name(path: Path = Path("/proc/cpuinfo")) -> str:
    lines = path.read_text().splitlines() if path.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def read_probe(mebibytes: int = 512) -> Callable[[], float]:
    """Each call reads `mebibytes` from memory and returns GB/s."""
    data = torch.ones(mebibytes * MEBIBYTE // 4)
    return lambda: data.nbytes / timed(data.sum) / 1e9


def matmul_probe(dtype: torch.dtype, size: int = 2048) -> float:
    """GFLOP/s of a product of two square matrices."""
    a = torch.randn(size, size).to(dtype)
    return 2 * size**3 / min(timed(lambda: a @ a) for _ in range(TRIALS)) / 1e9


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
