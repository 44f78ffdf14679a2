"""Modules that run on the C++ kernels, in place of transformers' own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pilotfish.model.attention import AttentionMetadata, KVPool, Scoring, native_tree_attention
from pilotfish.model.experts import Mixture, Router, expert_linear, linear_of, replace_modules, split_gate_up
from pilotfish.model.features import activation, layer_windows
from pilotfish.model.native import PANEL, pack_weight
from pilotfish.model.quantize import concatenated, int8_of

#: transformers' names of the architectures, before `Attention`, `MLP` and so on.
FAMILIES = (
    "Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "Mixtral", "Phi3", "Olmo2", "Gemma2", "Gemma3", "GptOss",
)  # fmt: skip
_PARTS = {
    f"{family}{part}": part for family in FAMILIES for part in ("Attention", "RMSNorm", "MLP", "Experts", "TopKRouter")
}
#: Decoders that are nothing but: embed; per layer x += attention(norm(x)), x += mlp(norm(x)); norm; head.
PLAIN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
#: Families whose norms multiply by their weight before they round.
_ROUND_ONCE = ("Olmo2", "Gemma2", "Gemma3", "GptOss")

#: activation(gate) * up: rows [rows, 2 n] of gates, then ups -> [rows, n].
GateOp = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PackedWeight:
    """A linear layer's weight as the kernels read it: plain, or int8 where torchao has quantized it."""

    panels: Tensor  # the weight's dtype or int8, as packed by `pack_weight`
    scales: Tensor | None  # of int8, float32 [ceil(N / 32) * 32]

    @classmethod
    def of(cls, weight: Tensor) -> PackedWeight:
        """weight [N, K]."""
        int8 = int8_of(weight)
        if int8 is None:
            return cls(pack_weight(weight.detach()), None)
        scales = torch.nn.functional.pad(int8.scales, (0, -len(int8.scales) % PANEL))
        return cls(pack_weight(int8.values, weight.dtype), scales)


class PackedLinear(torch.nn.Module):
    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.out_features = linear.out_features
        self.weight = PackedWeight.of(linear.weight)
        self.bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        w = self.weight
        rows = x.reshape(-1, x.shape[-1])
        y: Tensor = torch.ops.pilotfish.linear(rows, w.panels, self.out_features, w.scales)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


class CappedLinear(torch.nn.Module):
    """A linear whose outputs are soft-capped: the head of Gemma 2."""

    def __init__(self, linear: torch.nn.Module, cap: float) -> None:
        super().__init__()
        self.linear, self.cap = linear, cap

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        y: Tensor = self.linear(x)
        return torch.ops.pilotfish.softcap(y.view(-1, y.shape[-1]), self.cap).view_as(y)  # type: ignore[no-any-return]


class PackedGatedMLP(torch.nn.Module):
    """The gated feed-forward of Llama and its kin: down(silu(gate(x)) * up(x))."""

    def __init__(self, gate: torch.nn.Linear, up: torch.nn.Linear, down: torch.nn.Linear) -> None:
        super().__init__()
        self.inner_features, self.out_features = gate.out_features, down.out_features
        self.gate, self.up, self.down = (PackedWeight.of(linear.weight) for linear in (gate, up, down))

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., K]."""
        weights = self.gate, self.up, self.down
        panels, scales = [w.panels for w in weights], [w.scales for w in weights]
        rows = x.reshape(-1, x.shape[-1])
        y: Tensor = torch.ops.pilotfish.gated_mlp(rows, *panels, self.inner_features, self.out_features, *scales)
        return y.view_as(x)


class ActivatedMLP(torch.nn.Module):
    """A feed-forward with biases or another gate: down(op(gate(x), up(x)))."""

    def __init__(self, gate: torch.nn.Linear, up: torch.nn.Linear, down: torch.nn.Linear, op: GateOp) -> None:
        super().__init__()
        self.gate_up, self.down, self.op = PackedLinear(joined(gate, up)), PackedLinear(down), op

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., K]."""
        y: Tensor = self.down(self.op(self.gate_up(x.reshape(-1, x.shape[-1]))))
        return y.view_as(x)


class FusedRMSNorm(torch.nn.Module):
    """An RMS norm in one call. With a float32 weight the op rounds once, after the product."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        kind = type(norm).__name__.removesuffix("RMSNorm")
        weight = norm.weight.detach()
        self.weight = weight.float() if kind in _ROUND_ONCE else weight
        if kind.startswith("Gemma"):
            self.weight = 1.0 + self.weight
        self.eps = float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]."""
        return torch.ops.pilotfish.rms_norm(x, self.weight, self.eps)  # type: ignore[no-any-return]

    def of_sum(self, residual: Tensor, x: Tensor) -> Tensor:
        """Adds x to the residual in place, and norms that. Both [rows, size]."""
        return torch.ops.pilotfish.add_rms_norm(residual, x, self.weight, self.eps)  # type: ignore[no-any-return]

    def of_heads(self, x: Tensor) -> Tensor:
        """Norms each head, or all heads together if the weight is that wide. x [rows, heads, head_dim] -> like x."""
        normed: Tensor = self(x.reshape(len(x), -1, self.weight.numel()))
        return normed.view(x.shape)


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
        qkv = getattr(attention, "qkv_proj", None)
        self.joined = PackedLinear(qkv or joined(attention.q_proj, attention.k_proj, attention.v_proj))
        self.out = PackedLinear(attention.o_proj)
        norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        self.q_norm, self.k_norm = (None if norm is None else FusedRMSNorm(norm) for norm in norms)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        kv: KVPool,
        **_: object,
    ) -> tuple[Tensor, None]:
        """As transformers calls it: hidden_states [1, rows, K], cos and sin [1, rows, …] -> [1, rows, K]."""
        cos, sin = position_embeddings
        return self.attend(hidden_states[0], cos[0], sin[0], metadata, kv)[None], None

    def attend(self, hidden: Tensor, cos: Tensor, sin: Tensor, metadata: AttentionMetadata, kv: KVPool) -> Tensor:
        """hidden [rows, K], cos and sin [rows, rotated part of a head or half of it] -> [rows, K]. Writes KV to the
        pool."""
        rows = self.joined(hidden).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = rows.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm.of_heads(q), self.k_norm.of_heads(k)
        for x in (q, k):
            torch.ops.pilotfish.rotate(x[..., : self.rotated_per_angle * cos.shape[1]], cos, sin)
        keys, values = kv.keys[self.layer], kv.values[self.layer]
        out = native_tree_attention(q, k, v, keys, values, metadata, self.scoring)
        attended: Tensor = self.out(out.view(-1, self.heads * self.head_dim))
        return attended


def with_kernels(model: Any, context: int) -> Any:
    """Replace, in place, every part of a transformers causal LM that a kernel computes; a `PLAIN` model altogether."""
    replace_modules(model, fused)
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap:
        model.lm_head = CappedLinear(model.lm_head, cap)
        model.config.final_logit_softcapping = None
    return PlainDecoder(model, context) if type(model).__name__ in PLAIN else model


def fused(module: Any) -> torch.nn.Module | None:
    """The module that takes the place of one of transformers'; None if its parts may have one."""
    if isinstance(module, torch.nn.Linear):
        return PackedLinear(module)
    match _PARTS.get(type(module).__name__):
        case "Attention":
            return PackedAttention(module)
        case "RMSNorm":
            return FusedRMSNorm(module)
        case "MLP" if hasattr(module, "down_proj"):
            both = getattr(module, "gate_up_proj", None)
            gate, up = (module.gate_proj, module.up_proj) if both is None else split_gate_up(both)
            return _gated(gate, up, module.down_proj, activation(module.config))
        case "Experts":
            return Mixture(_packed_expert(module, i) for i in range(module.num_experts))
        case "TopKRouter":
            linear = PackedLinear(linear_of(module.weight, getattr(module, "bias", None)))
            return Router(linear, module.top_k, over_all=not getattr(module, "norm_topk_prob", True))
    return None


def _packed_expert(experts: Any, index: int) -> torch.nn.Module:
    gate_up, down = (expert_linear(experts, name, index) for name in ("gate_up_proj", "down_proj"))
    gate, up = split_gate_up(gate_up, interleaved=not experts.is_concatenated)
    if type(experts).__name__ == "GptOssExperts":
        op = functools.partial(torch.ops.pilotfish.gate_clamped, alpha=experts.alpha, limit=experts.limit)
        return ActivatedMLP(gate, up, down, op)
    return _gated(gate, up, down, activation(experts.config))


def _gated(gate: torch.nn.Linear, up: torch.nn.Linear, down: torch.nn.Linear, kind: str) -> torch.nn.Module:
    """`kind` is one of `features.ACTIVATIONS`."""
    if kind == "silu" and all(x.bias is None for x in (gate, up, down)):
        return PackedGatedMLP(gate, up, down)
    ops = {"silu": torch.ops.pilotfish.gate_silu, "gelu_pytorch_tanh": torch.ops.pilotfish.gate_gelu}
    return ActivatedMLP(gate, up, down, ops[kind])


def joined(*linears: torch.nn.Linear) -> torch.nn.Linear:
    """A linear that computes all of them, outputs end to end."""
    biased = linears[0].bias is not None
    bias = torch.cat([x.bias for x in linears]) if biased else None
    return linear_of(concatenated([x.weight for x in linears]), bias)


@dataclass(frozen=True)
class DecoderOutput:
    logits: Tensor  # [1, kept rows, vocab]


@dataclass(frozen=True)
class DecoderLayer:
    before_attention: FusedRMSNorm
    attention: PackedAttention
    before_mlp: FusedRMSNorm
    mlp: torch.nn.Module


class PlainDecoder(torch.nn.Module):
    """Runs a `PLAIN` model, its parts replaced already, without transformers' own Python between the kernels: for
    small models that is most of a forward. The model's rotary embedding computes the angles of all positions, once."""

    def __init__(self, model: Any, context: int) -> None:
        super().__init__()
        inner = model.model
        self.embed_tokens = inner.embed_tokens
        self.layers = inner.layers  # holds the parts for code that walks over modules
        self._parts = [
            DecoderLayer(layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp)
            for layer in inner.layers
        ]
        self.norm: FusedRMSNorm = inner.norm
        self.lm_head: torch.nn.Module = model.lm_head
        cos, sin = inner.rotary_emb(inner.embed_tokens.weight, torch.arange(context)[None])
        self.cos, self.sin = cos[0], sin[0]  # [context, rotated part of a head]

    def forward(
        self,
        input_ids: Tensor,  # [1, rows]
        position_ids: Tensor,  # [1, rows]
        logits_to_keep: Tensor,  # [kept rows], rows whose logits are wanted
        metadata: AttentionMetadata,
        kv: KVPool,
        **_: object,
    ) -> DecoderOutput:
        """Writes KV to the pool."""
        cos, sin = self.cos[position_ids[0]], self.sin[position_ids[0]]
        residual = torch.nn.functional.embedding(input_ids[0], self.embed_tokens.weight)
        update = torch.zeros_like(residual)
        for layer in self._parts:
            hidden = layer.before_attention.of_sum(residual, update)
            update = layer.attention.attend(hidden, cos, sin, metadata, kv)
            update = layer.mlp(layer.before_mlp.of_sum(residual, update))
        hidden = self.norm.of_sum(residual, update)
        return DecoderOutput(self.lm_head(hidden[logits_to_keep])[None])
