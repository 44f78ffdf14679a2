"""What modules of heads are made of: products, norms, feed-forwards, attention over slots; on the C++ kernels, or in
torch operations on any device, which are their reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pilotfish.errors import ModelError
from pilotfish.model.attention import AttentionMetadata, Scoring, TreeAttention, attention_on
from pilotfish.model.cpu import native
from pilotfish.model.cpu.native_modules import PackedLinear, gated_feed_forward
from pilotfish.model.experts import Affine
from pilotfish.model.heads.spec import Decoder
from pilotfish.model.kv_planes import LayerKV

_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}
#: Positions whose angles are computed at first; then twice as many, and so on.
_FIRST_ANGLES = 1024


class Parts:
    """Makes the parts of one head of its tensors."""

    def __init__(
        self, tensors: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype, *, packed: bool
    ) -> None:
        """`packed`: for the C++ kernels."""
        self.device, self.dtype, self.packed = device, dtype, packed
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name].detach().to(self.device, self.dtype)

    def affine(self, name: str, outputs: Tensor | slice = slice(None)) -> Affine:
        """Of a product, by its name without `.weight`; all outputs, or those."""
        weight, bias = (f"{name}.{kind}" for kind in ("weight", "bias"))
        return Affine(self.tensor(weight)[outputs], self.tensor(bias)[outputs] if bias in self else None)

    def product(self, *affines: Affine) -> torch.nn.Module:
        """One for all, their outputs end to end: x [rows, inputs] -> [rows, outputs]."""
        return PackedLinear(*affines) if self.packed else JoinedLinear(*affines)

    def norm(self, name: str, decoder: Decoder) -> HeadNorm | None:
        """None where the head has none of this name."""
        weight = f"{name}.weight"
        return HeadNorm(self.tensor(weight), decoder, packed=self.packed) if weight in self else None

    def feed_forward(self, layer: str, decoder: Decoder) -> torch.nn.Module:
        """x [rows, hidden] -> [rows, hidden]."""
        if decoder.activation not in _GATES:
            raise ModelError(f"head: activation {decoder.activation} is not supported; {', '.join(_GATES)} are")
        gate, up, down = (self.affine(f"{layer}.mlp.{name}_proj") for name in ("gate", "up", "down"))
        if self.packed:
            return gated_feed_forward(gate, up, down, decoder.activation)
        return GatedFeedForward(self.product(gate, up), self.product(down), decoder.activation)


def runs_packed(device: torch.device, head_dim: int, *, eager: bool) -> bool:
    """Whether the C++ kernels run a head. Builds them if they are not built yet."""
    return not eager and device.type == "cpu" and head_dim % native.PANEL == 0 and native.load_kernels()


class JoinedLinear(torch.nn.Module):
    """One library product for several linear layers, their outputs end to end."""

    def __init__(self, *affines: Affine) -> None:
        super().__init__()
        self.weight = torch.cat([affine.weight for affine in affines])
        biases = [affine.bias for affine in affines if affine.bias is not None]
        self.bias = torch.cat(biases) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class GatedFeedForward(torch.nn.Module):
    """down(activation(gate(x)) * up(x))"""

    def __init__(self, gate_up: torch.nn.Module, down: torch.nn.Module, activation: str) -> None:
        super().__init__()
        self.gate_up, self.down, self.gate = gate_up, down, _GATES[activation]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return cast(Tensor, self.down(self.gate(gate) * up))


class HeadNorm(torch.nn.Module):
    """An RMS norm. Where its weight is an offset from 1, as in Qwen3-Next, it is kept in float32, and rounded once."""

    def __init__(self, weight: Tensor, decoder: Decoder, *, packed: bool) -> None:
        super().__init__()
        self.weight = weight.float() + decoder.norm_offset if decoder.norm_offset else weight
        self.eps, self.packed = decoder.eps, packed

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]."""
        if self.packed:
            return torch.ops.pilotfish.rms_norm(x, self.weight, self.eps)  # type: ignore[no-any-return]
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (self.weight * normed.to(self.weight.dtype)).to(x.dtype)

    def of_sum(self, residual: Tensor, x: Tensor) -> Tensor:
        """Adds x to the residual in place, and norms that. Both [rows, size]."""
        if self.packed:
            return torch.ops.pilotfish.add_rms_norm(residual, x, self.weight, self.eps)  # type: ignore[no-any-return]
        return cast(Tensor, self(residual.add_(x)))


class Angles:
    """Cosines and sines that queries and keys are rotated by, of each position."""

    def __init__(self, decoder: Decoder, dtype: torch.dtype, device: torch.device) -> None:
        """ModelError for a kind of rotary embedding whose angles depend on the longest sequence, or an unknown one."""
        kind = decoder.rope.get("rope_type", "default")
        allowed = ("default", "linear", "llama3", "yarn")
        if kind not in allowed:
            raise ModelError(f"head: rope_type {kind} is not supported; {', '.join(allowed)} are")
        # The default is a linear one that stretches by 1.
        rope = {**decoder.rope, **({"rope_type": "linear", "factor": 1.0} if kind == "default" else {})}
        config = LlamaConfig(
            hidden_size=decoder.hidden,
            num_attention_heads=decoder.heads,
            head_dim=decoder.head_dim,
            max_position_embeddings=decoder.context,
            rope_parameters=rope,
        )
        frequencies, self._scale = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, device)
        self._frequencies = frequencies.float()  # [rotated part of a head / 2]
        self._dtype, self._device = dtype, device
        self._table = self._of(_FIRST_ANGLES)

    def _of(self, count: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(count, device=self._device).float()[:, None] * self._frequencies
        both = torch.cat((angles, angles), dim=-1)
        cos, sin = ((x * self._scale).to(self._dtype) for x in (both.cos(), both.sin()))
        return cos, sin

    def reach(self, count: int) -> None:
        """Have those of the first `count` positions."""
        if count > len(self._table[0]):
            self._table = self._of(max(count, 2 * len(self._table[0])))

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Of positions within reach, int [rows] -> cosines and sines [rows, rotated part of a head]."""
        cos, sin = self._table
        return cos.index_select(0, positions), sin.index_select(0, positions)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, metadata: AttentionMetadata, scoring: Scoring
) -> Tensor:
    """The C++ kernel as a `TreeAttention`."""
    fields = (field for record in (kv, metadata, scoring) for field in vars(record).values())
    return torch.ops.pilotfish.tree_attention(q, k, v, *fields)  # type: ignore[no-any-return]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [rows, heads, head_dim], cos and sin [rows, rotated part of a head] -> like x."""
    size = cos.shape[1]
    turned, rest = x[..., :size], x[..., size:]
    halves = torch.cat((-turned[..., size // 2 :], turned[..., : size // 2]), dim=-1)
    return torch.cat((turned * cos[:, None] + halves * sin[:, None], rest), dim=-1)


class HeadAttention(torch.nn.Module):
    """Attention of a head's layer over its slots: queries, keys, values and gates come from one product."""

    def __init__(self, parts: Parts, decoder: Decoder, layer: int, *, eager: bool) -> None:
        super().__init__()
        prefix, shape = f"layers.{layer}.self_attn", decoder
        self.packed = parts.packed
        query, key, value = (parts.affine(f"{prefix}.{name}_proj") for name in "qkv")
        gates: tuple[Affine, ...] = ()
        if shape.gated_attention:
            query, gate = _queries_and_gates(query, shape)
            gates = (gate,)
        self.joined = parts.product(query, key, value, *gates)
        self.out = parts.product(parts.affine(f"{prefix}.o_proj"))
        self.q_norm, self.k_norm = (
            parts.norm(f"{prefix}.{name}_norm", shape) if shape.qk_norm else None for name in "qk"
        )
        self.heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads * len(gates))
        self.head_dim = shape.head_dim
        self.scoring = Scoring(shape.head_dim**-0.5, shape.window)
        self.attend: TreeAttention = packed_attention if self.packed else attention_on(parts.device, eager=eager)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, metadata: AttentionMetadata, kv: LayerKV) -> Tensor:
        """x [rows, inputs], cos and sin [rows, rotated part of a head] -> [rows, hidden]. Writes KV."""
        rows = self.joined(x).view(-1, sum(self.heads), self.head_dim)
        q, k, v, gates = rows.split(self.heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.packed:
            for part in (q, k):
                torch.ops.pilotfish.rotate(part[..., : cos.shape[1]], cos, sin)
        else:
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        attended = self.attend(q, k, v, kv, metadata, self.scoring)
        if self.heads[3]:  # in float64: vectors and the rest of a row have other functions, with other last bits
            attended = (attended.double() * gates.double().sigmoid()).to(x.dtype)
        return cast(Tensor, self.out(attended.reshape(len(x), -1)))


def _queries_and_gates(joined: Affine, shape: Decoder) -> tuple[Affine, Affine]:
    """Of a product that gives, head by head, a query and a gate."""

    def half(x: Tensor, which: int) -> Tensor:
        return x.view(shape.heads, 2, shape.head_dim, *x.shape[1:])[:, which].flatten(0, 1)

    def affine(which: int) -> Affine:
        return Affine(half(joined.weight, which), None if joined.bias is None else half(joined.bias, which))

    return affine(0), affine(1)


@dataclass(frozen=True)
class RotatedRows:
    """Where rows stand: by angles and by slots."""

    cos: Tensor  # [rows, rotated part of a head]
    sin: Tensor
    metadata: AttentionMetadata


class HeadLayer(torch.nn.Module):
    def __init__(self, parts: Parts, decoder: Decoder, layer: int, *, eager: bool) -> None:
        super().__init__()
        prefix = f"layers.{layer}"
        self.attention = HeadAttention(parts, decoder, layer, eager=eager)
        self.input_norm = parts.norm(f"{prefix}.input_layernorm", decoder)
        self.norm = parts.norm(f"{prefix}.post_attention_layernorm", decoder)
        self.feed_forward = parts.feed_forward(prefix, decoder)

    def forward(self, residual: Tensor, entering: Tensor | None, rows: RotatedRows, kv: LayerKV) -> Tensor:
        """`entering` attention, where that is not the normed residual. [rows, hidden] -> likewise, in place."""
        x = normed(self.input_norm, residual) if entering is None else entering
        attended = self.attention(x, rows.cos, rows.sin, rows.metadata, kv)
        x = residual.add_(attended) if self.norm is None else self.norm.of_sum(residual, attended)
        return residual.add_(self.feed_forward(x))


def normed(norm: HeadNorm | None, x: Tensor) -> Tensor:
    return x if norm is None else cast(Tensor, norm(x))


def kv_shape(decoder: Decoder) -> SimpleNamespace:
    """As a model's configuration tells it."""
    return SimpleNamespace(
        num_hidden_layers=decoder.layers, num_key_value_heads=decoder.kv_heads, head_dim=decoder.head_dim
    )
