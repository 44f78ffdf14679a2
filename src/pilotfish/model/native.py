"""The C++ kernels: built once a machine with the compiler that torch.compile needs as well, then cached.

    torch.ops.pilotfish.linear          rows @ packed weights, a row's bits independent of the other rows
    torch.ops.pilotfish.tree_attention  attention of tree rows over slots, likewise
    torch.ops.pilotfish.perturbed_topk  the best tokens by logit + shared noise

`kernels.cpp` documents each. The references beside them are `attention.dense_tree_attention`,
`sampling.perturbed_topk_reference` and `torch.nn.functional.linear`.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import shutil
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = ["-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]
PANEL = 32  # kPanel in kernels.cpp


def cache_dir() -> Path:
    """Where built kernels and built pairs are kept: $PILOTFISH_CACHE, else the user's cache directory."""
    return Path(os.environ.get("PILOTFISH_CACHE") or Path.home() / ".cache" / "pilotfish")


@functools.cache
def load_kernels() -> bool:
    """Build (about 40 s, once) and load the kernels. False, with one logged line, without a compiler."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        logger.warning("no C++ compiler (%s): slower reference kernels are used", compiler)
        return False
    from torch.utils import cpp_extension

    directory = cache_dir() / "kernels" / _digest()
    directory.mkdir(parents=True, exist_ok=True)
    cpp_extension.load(
        "pilotfish_kernels",
        [str(_SOURCE)],
        extra_cflags=_FLAGS,
        build_directory=str(directory),
        is_python_module=False,
    )
    _register_shapes()
    return True


def _digest() -> str:
    """Names a build: the source, the flags, the torch it links to and the processor it is tuned for."""
    cpu = Path("/proc/cpuinfo")
    flags = (
        next((line for line in cpu.read_text().splitlines() if line.startswith("flags")), "") if cpu.exists() else ""
    )
    parts = (_SOURCE.read_text(), " ".join(_FLAGS), torch.__version__, flags)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _register_shapes() -> None:
    """Tell torch.compile the shapes of what the kernels return."""

    def linear(x: torch.Tensor, packed: torch.Tensor, outputs: int) -> torch.Tensor:  # noqa: ARG001
        return x.new_empty(x.shape[0], outputs)

    def tree_attention(q: torch.Tensor, *_: object) -> torch.Tensor:
        return torch.empty_like(q, memory_format=torch.contiguous_format)

    torch.library.register_fake("pilotfish::linear", linear)
    torch.library.register_fake("pilotfish::tree_attention", tree_attention)


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> [ceil(N / 32), K, 32], the layout that `linear` reads (see kernels.cpp)."""
    outputs, depth = weight.shape
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -outputs % PANEL))
    packed = padded.view(-1, PANEL, depth).transpose(1, 2)
    if weight.dtype == torch.bfloat16:
        packed = packed.reshape(-1, depth, 2, PANEL // 2).transpose(2, 3).reshape(-1, depth, PANEL)
    return packed.contiguous()


class PackedLinear(torch.nn.Module):
    """`nn.Linear` on packed weights. Inference only."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.out_features = linear.out_features
        self.packed = pack_weight(linear.weight.detach())
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N]."""
        y: torch.Tensor = torch.ops.pilotfish.linear(x.reshape(-1, x.shape[-1]), self.packed, self.out_features)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias
