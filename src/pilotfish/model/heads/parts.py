from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pilotfish.model.attention import AttentionMetadata, Scoring
from pilotfish.model.devices import kernels_of
from pilotfish.model.experts import Affine
from pilotfish.model.feature_tap import FeatureTap
from pilotfish.model.heads.spec import Decoder, HeadFiles, Projection
from pilotfish.model.kernels import Gate, Kernels, RMSNorm
from pilotfish.model.kv_planes import LayerKV

#: Positions whose angles are computed at first; then twice as many, and so on.
_FIRST_ANGLES = 1024


class Parts:
    def __init__(self, tensors: Mapping[str, Tensor], kernels: Kernels, dtype: torch.dtype) -> None:
        self.tensors, self.kernels, self.device, self.dtype = tensors, kernels, kernels.device, dtype

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name].detach().to(self.device, self.dtype)

    def affine(self, name: str, outputs: Tensor | slice = slice(None)) -> Affine:
        weight, bias = (f"{name}.{kind}" for kind in ("weight", "bias"))
        return Affine(self.tensor(weight)[outputs], self.tensor(bias)[outputs] if bias in self else None)

    def product(self, *affines: Affine) -> torch.nn.Module:
        return self.kernels.linear(*affines)

    def norm(self, name: str, decoder: Decoder) -> RMSNorm | None:
        """None without a weight. Weights that are offsets from 1 (Qwen3-Next) stay in float32: the norm rounds once."""
        if f"{name}.weight" not in self:
            return None
        weight = self.tensor(f"{name}.weight")
        weight = weight.float() + decoder.norm_offset if decoder.norm_offset else weight
        return self.kernels.rms_norm(weight, decoder.eps)


class Angles:
    def __init__(self, decoder: Decoder, dtype: torch.dtype, device: torch.device) -> None:
        kind = decoder.rope.get("rope_type", "default")
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
        if count > len(self._table[0]):
            self._table = self._of(max(count, 2 * len(self._table[0])))

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._table
        return cos.index_select(0, positions), sin.index_select(0, positions)


class HeadAttention(torch.nn.Module):
    def __init__(self, parts: Parts, shape: Decoder, layer: int) -> None:
        super().__init__()
        prefix = f"layers.{layer}.self_attn"
        self.kernels = parts.kernels
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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, metadata: AttentionMetadata, kv: LayerKV) -> Tensor:
        """x [rows, inputs], cos and sin [rows, rotated part of a head] -> [rows, hidden]. Writes KV."""
        rows = self.joined(x).view(-1, sum(self.heads), self.head_dim)
        q, k, v, gates = rows.split(self.heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (self.kernels.rotate(part, cos, sin) for part in (q, k))
        attended = self.kernels.attend(q, k, v, kv, metadata, self.scoring)
        if self.heads[3]:  # in float64: vectors and the rest of a row have other functions, with other last bits
            attended = (attended.double() * gates.double().sigmoid()).to(x.dtype)
        return cast(Tensor, self.out(attended.reshape(len(x), -1)))


def _queries_and_gates(joined: Affine, shape: Decoder) -> tuple[Affine, Affine]:

    def half(x: Tensor, which: int) -> Tensor:
        return x.view(shape.heads, 2, shape.head_dim, *x.shape[1:])[:, which].flatten(0, 1)

    def affine(which: int) -> Affine:
        return Affine(half(joined.weight, which), None if joined.bias is None else half(joined.bias, which))

    return affine(0), affine(1)


@dataclass(frozen=True)
class RotatedRows:
    cos: Tensor  # [rows, rotated part of a head]
    sin: Tensor
    metadata: AttentionMetadata


class HeadLayer(torch.nn.Module):
    def __init__(self, parts: Parts, decoder: Decoder, layer: int) -> None:
        super().__init__()
        prefix = f"layers.{layer}"
        self.attention = HeadAttention(parts, decoder, layer)
        self.input_norm = parts.norm(f"{prefix}.input_layernorm", decoder)
        self.norm = parts.norm(f"{prefix}.post_attention_layernorm", decoder)
        gate, up, down = (parts.affine(f"{prefix}.mlp.{name}_proj") for name in ("gate", "up", "down"))
        self.feed_forward = parts.kernels.feed_forward(gate, up, down, Gate(decoder.activation))

    def forward(self, residual: Tensor, entering: Tensor | None, rows: RotatedRows, kv: LayerKV) -> Tensor:
        """`entering`: the input of attention if it is not the normed residual. [rows, hidden] -> likewise, in place."""
        x = normed(self.input_norm, residual) if entering is None else entering
        attended = self.attention(x, rows.cos, rows.sin, rows.metadata, kv)
        x = residual.add_(attended) if self.norm is None else self.norm.of_sum(residual, attended)
        return residual.add_(self.feed_forward(x))


def normed(norm: RMSNorm | None, x: Tensor) -> Tensor:
    return x if norm is None else cast(Tensor, norm(x))


def kv_shape(decoder: Decoder) -> SimpleNamespace:
    return SimpleNamespace(
        num_hidden_layers=decoder.layers, num_key_value_heads=decoder.kv_heads, head_dim=decoder.head_dim
    )


# -- what the target makes of its hidden states


def feature_tap(files: HeadFiles, device: torch.device, dtype: torch.dtype, *, eager: bool) -> FeatureTap:
    projection, kernels = files.spec.projection, kernels_of(device, 0, eager=eager)
    project = Project.of(projection, Parts(files.tensors, kernels, dtype))
    return FeatureTap(projection.layers, projection.width, project, files.digest)


@dataclass(frozen=True)
class Project:
    """States [rows, parts * hidden] -> features [rows, width]."""

    state_norm: RMSNorm | None  # over all parts together, or each
    product: torch.nn.Module | None
    feature_norm: RMSNorm | None

    @classmethod
    def of(cls, projection: Projection, parts: Parts) -> "Project":
        def norm(*names: str) -> RMSNorm:
            weights = torch.cat([parts.tensor(f"{name}.weight") for name in names])
            return parts.kernels.rms_norm(weights, projection.eps, len(names))

        states = ["input_norm"] if projection.joined_norm else []
        if projection.part_norms:
            states = [f"fc_norm.{i}" for i in range(len(projection.layers))]
        return cls(
            norm(*states) if states else None,
            parts.product(parts.affine("fc")) if projection.fc else None,
            norm("feature_norm") if projection.feature_norm else None,
        )

    def __call__(self, states: Tensor) -> Tensor:
        if self.state_norm is not None:
            states = self.state_norm(states)
        if self.product is not None:
            states = self.product(states)
        return states if self.feature_norm is None else cast(Tensor, self.feature_norm(states))
