"""A decoder without transformers' own Python between the kernels: for small models that is most of a forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from pilotfish.model.attention import AttentionMetadata, KVPool
from pilotfish.model.native_modules import FusedRMSNorm, PackedAttention

#: Decoders that are nothing but: embed; per layer x += attention(norm(x)), x += mlp(norm(x)); norm; head.
PLAIN = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def is_plain(model: torch.nn.Module) -> bool:
    return type(model).__name__ in PLAIN


@dataclass(frozen=True)
class DecoderOutput:
    logits: torch.Tensor  # [1, kept rows, vocab]


@dataclass(frozen=True)
class DecoderLayer:
    before_attention: FusedRMSNorm
    attention: PackedAttention
    before_mlp: FusedRMSNorm
    mlp: torch.nn.Module


class PlainDecoder(torch.nn.Module):
    """Takes the place of a transformers causal LM of one of the `PLAIN` kinds whose parts are kernels already. The
    model's own rotary embedding computes the angles of all positions, once."""

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
        input_ids: torch.Tensor,  # [1, rows]
        position_ids: torch.Tensor,  # [1, rows]
        logits_to_keep: torch.Tensor,  # [kept rows], rows whose logits are wanted
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
