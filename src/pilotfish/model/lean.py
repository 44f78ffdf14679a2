"""A decoder without transformers' own Python between the kernels: for small models that is most of a forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pilotfish.model.attention import KVPool, Placement
from pilotfish.model.native import PackedAttention
from pilotfish.model.rowwise import FusedRMSNorm

#: Decoders that are nothing but: embed; per layer x += attention(norm(x)), x += mlp(norm(x)); norm; head.
PLAIN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def is_plain(model: torch.nn.Module) -> bool:
    """Whether `LeanDecoder` computes what this model does, its parts being kernels already."""
    return type(model).__name__ in PLAIN


@dataclass(frozen=True)
class Output:
    logits: torch.Tensor  # [1, kept rows, vocab]


@dataclass(frozen=True)
class LeanLayer:
    """One decoder layer's parts."""

    before_attention: FusedRMSNorm
    attention: PackedAttention
    before_mlp: FusedRMSNorm
    mlp: torch.nn.Module

    @classmethod
    def of(cls, layer: Any) -> LeanLayer:
        return cls(layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp)


class LeanDecoder(torch.nn.Module):
    """In place of a transformers causal LM of one of the `PLAIN` kinds, on the same parts. Angles of all positions
    are computed once, by the model's own rotary embedding."""

    def __init__(self, model: Any, context: int) -> None:
        super().__init__()
        inner = model.model
        self.embed_tokens = inner.embed_tokens
        self.layers = inner.layers  # which holds the parts, for whoever walks over modules
        self._lean = [LeanLayer.of(layer) for layer in inner.layers]
        self.norm: FusedRMSNorm = inner.norm
        self.lm_head: torch.nn.Module = model.lm_head
        cos, sin = inner.rotary_emb(inner.embed_tokens.weight, torch.arange(context)[None])
        self.cos, self.sin = cos[0], sin[0]  # [context, rotated part of a head]

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        logits_to_keep: torch.Tensor,
        placement: Placement,
        kv: KVPool,
        **_: object,
    ) -> Output:
        """Ids and positions [1, rows], rows to keep [kept rows]. Writes KV to the pool."""
        cos, sin = self.cos[position_ids[0]], self.sin[position_ids[0]]
        residual = torch.nn.functional.embedding(input_ids[0], self.embed_tokens.weight)
        update = torch.zeros_like(residual)
        for layer in self._lean:
            hidden = layer.before_attention.of_sum(residual, update)
            update = layer.attention.attend(hidden, cos, sin, placement, kv)
            update = layer.mlp(layer.before_mlp.of_sum(residual, update))
        hidden = self.norm.of_sum(residual, update)
        return Output(self.lm_head(hidden[logits_to_keep])[None])
