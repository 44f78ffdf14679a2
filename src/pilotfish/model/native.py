"""The C++ kernels: built once a machine with its own compiler, then cached.

    torch.ops.pilotfish.linear          rows @ packed weights, a row's bits independent of the other rows
    torch.ops.pilotfish.gated_mlp       (silu(rows @ gate) * (rows @ up)) @ down, likewise
    torch.ops.pilotfish.rms_norm        one call instead of six
    torch.ops.pilotfish.add_rms_norm    of a residual stream, after adding to it
    torch.ops.pilotfish.rotate          rotary position embedding in place
    torch.ops.pilotfish.gate_silu       silu(gate) * up; gate_gelu, gate_clamped likewise
    torch.ops.pilotfish.softcap         cap * tanh(x / cap)
    torch.ops.pilotfish.tree_attention  attention of tree rows over slots
    torch.ops.pilotfish.filter_logits   temperature, min-p, top-k, top-p
    torch.ops.pilotfish.perturbed_topk  the best tokens by logit + shared noise

`kernels.cpp` documents each. The references beside them are transformers' own modules,
`attention.dense_tree_attention`, `sampling.filtered_reference` and `sampling.perturbed_topk_reference`.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from pilotfish.model.attention import KVPool, Placement, Scoring, attend
from pilotfish.model.experts import Mixture, Router, expert_linear
from pilotfish.model.features import activation, layer_windows
from pilotfish.model.linears import joined, linear_of, split_gate_up
from pilotfish.model.quantize import int8_of
from pilotfish.model.rowwise import CappedLinear, FusedRMSNorm, RowOp, clamped_gate_op, gate_op, norm_heads

logger = logging.getLogger(__name__)

_LIBRARY = "pilotfish_kernels"
_SOURCE = Path(__file__).with_name("kernels.cpp")
_FLAGS = [
    "-O3",
    "-fopenmp",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
]
PANEL = 32  # kPanel in kernels.cpp
#: transformers' names of the architectures, before `Attention`, `MLP` and so on.
FAMILIES = (
    "Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Mixtral", "Phi3", "Olmo2", "Gemma2", "Gemma3", "GptOss",
)  # fmt: skip


def processor_type() -> str:
    """What the kernels are compiled for, as the compiler names it: $PILOTFISH_MARCH, else this machine's processor.
    `x86-64-v3` is every processor with AVX2."""
    return os.environ.get("PILOTFISH_MARCH") or "native"


def cache_dir() -> Path:
    """Where built kernels are kept: $PILOTFISH_CACHE, else the user's cache directory."""
    return Path(os.environ.get("PILOTFISH_CACHE") or Path.home() / ".cache" / "pilotfish")


@functools.cache
def load_kernels() -> bool:
    """Build (under a minute, once) and load the kernels. False, with one logged line, where that fails."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        logger.warning("no C++ compiler (%s): slower reference kernels are used", compiler)
        return False
    directory = cache_dir() / "kernels" / _digest()
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
    """Each process builds apart, and what is complete is moved to `directory`: none waits for the lock of another,
    which a killed one would have left."""
    from torch.utils import cpp_extension

    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=directory) as build:
        flags = [*_FLAGS, f"-march={processor_type()}"]
        cpp_extension.load(_LIBRARY, [str(_SOURCE)], extra_cflags=flags, build_directory=build, is_python_module=False)
        built = Path(build, f"{_LIBRARY}.so")
        built.replace(directory / built.name)


def kernels_loaded() -> bool:
    """Whether `load_kernels` has succeeded in this process; unlike it, never builds."""
    return load_kernels.cache_info().currsize > 0 and load_kernels()


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


@dataclass(frozen=True)
class PackedWeight:
    """A weight as the kernels read it, whatever its format: plain, or int8 where torchao has quantized it."""

    panels: torch.Tensor  # the weight's dtype or int8, as packed by `pack_weight`
    scales: torch.Tensor | None  # of int8, float32 [ceil(N / 32) * 32]

    @classmethod
    def of(cls, weight: torch.Tensor) -> PackedWeight:
        """Of a linear layer's weight [N, K]."""
        int8 = int8_of(weight)
        if int8 is None:
            return cls(pack_weight(weight.detach()), None)
        scales = torch.nn.functional.pad(int8.scales, (0, -len(int8.scales) % PANEL))
        return cls(pack_weight(int8.values, weight.dtype), scales)


class PackedLinear(torch.nn.Module):
    """`nn.Linear` on packed weights."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.out_features = linear.out_features
        self.weight = PackedWeight.of(linear.weight)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., N]."""
        w = self.weight
        rows = x.reshape(-1, x.shape[-1])
        y: torch.Tensor = torch.ops.pilotfish.linear(rows, w.panels, self.out_features, w.scales)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


class PackedGatedMLP(torch.nn.Module):
    """The gated feed-forward of Llama and its kin: down(silu(gate(x)) * up(x))."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.inner_features = mlp.gate_proj.out_features
        self.out_features = mlp.down_proj.out_features
        projections = (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
        self.gate, self.up, self.down = (PackedWeight.of(projection.weight) for projection in projections)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., K]."""
        weights = self.gate, self.up, self.down
        panels, scales = [w.panels for w in weights], [w.scales for w in weights]
        rows = x.reshape(-1, x.shape[-1])
        y: torch.Tensor = torch.ops.pilotfish.gated_mlp(rows, *panels, self.inner_features, self.out_features, *scales)
        return y.view_as(x)


class ActivatedMLP(torch.nn.Module):
    """A feed-forward with biases or another gate: down(op(gate(x), up(x)))."""

    def __init__(self, gate: torch.nn.Linear, up: torch.nn.Linear, down: torch.nn.Linear, op: RowOp) -> None:
        super().__init__()
        self.gate_up, self.down, self.op = PackedLinear(joined(gate, up)), PackedLinear(down), op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> [..., K]."""
        y: torch.Tensor = self.down(self.op(self.gate_up(x.reshape(-1, x.shape[-1]))))
        return y.view_as(x)


class PackedAttention(torch.nn.Module):
    """The attention of the `FAMILIES` over slots: queries, keys and values come from one product."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        config = attention.config
        self.layer, self.head_dim = attention.layer_idx, attention.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.scoring = Scoring(
            attention.scaling,
            layer_windows(config)[self.layer],
            getattr(attention, "attn_logit_softcapping", None) or 0.0,
            getattr(attention, "sinks", None),
        )
        self.rotated_per_angle = 2 if type(attention).__name__ == "GptOssAttention" else 1
        fused = getattr(attention, "qkv_proj", None)
        self.joined = PackedLinear(fused or joined(attention.q_proj, attention.k_proj, attention.v_proj))
        self.out = PackedLinear(attention.o_proj)
        norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        self.q_norm, self.k_norm = (None if norm is None else FusedRMSNorm(norm) for norm in norms)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        placement: Placement,
        kv: KVPool,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """As transformers calls it: hidden_states [1, rows, K], cos and sin [1, rows, …] -> [1, rows, K]."""
        cos, sin = position_embeddings
        return self.attend(hidden_states[0], cos[0], sin[0], placement, kv)[None], None

    def attend(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, placement: Placement, kv: KVPool
    ) -> torch.Tensor:
        """hidden [rows, K], cos and sin [rows, rotated part of a head or half of it] -> [rows, K]. Writes KV to the
        pool."""
        rows = self.joined(hidden).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = rows.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = norm_heads(self.q_norm, q), norm_heads(self.k_norm, k)
        for x in (q, k):
            torch.ops.pilotfish.rotate(x[..., : self.rotated_per_angle * cos.shape[1]], cos, sin)
        out = attend(torch.ops.pilotfish.tree_attention, self.layer, q, k, v, self.scoring, placement, kv)
        attended: torch.Tensor = self.out(out.view(-1, self.heads * self.head_dim))
        return attended


def use_kernels(model: Any) -> None:
    """Replace, in place, every part of a transformers causal LM that a kernel computes."""
    replace_parts(model)
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap:
        model.lm_head = CappedLinear(model.lm_head, cap)
        model.config.final_logit_softcapping = None


def replace_parts(module: torch.nn.Module) -> None:
    for name, child in list(module.named_children()):
        fused = _fused(child)
        if fused is None:
            replace_parts(child)
        else:
            setattr(module, name, fused)


def _fused(module: Any) -> torch.nn.Module | None:
    kind = type(module).__name__
    if kind in _named("Attention"):
        return PackedAttention(module)
    if isinstance(module, torch.nn.Linear):
        return PackedLinear(module)
    if kind in _named("RMSNorm"):
        return FusedRMSNorm(module)
    if kind in _named("MLP") and hasattr(module, "down_proj"):
        return _packed_mlp(module)
    if kind in _named("Experts"):
        return Mixture(_packed_expert(module, i) for i in range(module.num_experts))
    if kind in _named("TopKRouter"):
        linear = PackedLinear(linear_of(module.weight, getattr(module, "bias", None)))
        return Router(linear, module.top_k, over_all=not getattr(module, "norm_topk_prob", True))
    return None


def _named(part: str) -> set[str]:
    """transformers' names of that part in each family."""
    return {f"{family}{part}" for family in FAMILIES}


def _packed_mlp(mlp: Any) -> torch.nn.Module:
    fused = getattr(mlp, "gate_up_proj", None)
    gate, up = (mlp.gate_proj, mlp.up_proj) if fused is None else split_gate_up(fused)
    return _gated(gate, up, mlp.down_proj, activation(mlp.config))


def _packed_expert(experts: Any, index: int) -> torch.nn.Module:
    gate_up, down = (expert_linear(experts, name, index) for name in ("gate_up_proj", "down_proj"))
    gate, up = split_gate_up(gate_up, interleaved=not experts.is_concatenated)
    if type(experts).__name__ == "GptOssExperts":
        return ActivatedMLP(gate, up, down, clamped_gate_op(experts.alpha, experts.limit))
    return _gated(gate, up, down, activation(experts.config))


def _gated(gate: torch.nn.Linear, up: torch.nn.Linear, down: torch.nn.Linear, kind: str) -> torch.nn.Module:
    if kind == "silu" and all(x.bias is None for x in (gate, up, down)):
        return PackedGatedMLP(SimpleNamespace(gate_proj=gate, up_proj=up, down_proj=down))
    return ActivatedMLP(gate, up, down, gate_op(kind))
