from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from pilotfish.model.heads.spec import Decoder


class Keys(NamedTuple):
    keys: Tensor  # [rows, kv heads, tokens, head_dim]
    values: Tensor  # the same


class Norm(nn.RMSNorm):
    """In float32, whatever it gets."""

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = super().forward(x.float())
        return normed


class Attention(nn.Module):
    def __init__(self, decoder: Decoder, width: int) -> None:
        super().__init__()
        self.decoder = decoder
        size = decoder.head_dim
        self.q_proj = nn.Linear(width, decoder.heads * size, bias=False)
        self.k_proj = nn.Linear(width, decoder.kv_heads * size, bias=False)
        self.v_proj = nn.Linear(width, decoder.kv_heads * size, bias=False)
        self.o_proj = nn.Linear(decoder.heads * size, decoder.hidden, bias=False)
        if decoder.qk_norm:
            self.q_norm = Norm(size, decoder.eps)
            self.k_norm = Norm(size, decoder.eps)

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """[rows, kv heads, heads of each, tokens, head_dim] of x [rows, tokens, width], scaled."""
        queries: Tensor = self._heads(self.q_proj(x))
        queries = self.q_norm(queries) if self.decoder.qk_norm else queries
        rows, heads, tokens, size = queries.shape
        queries = self._rotate(queries, positions) * size**-0.5
        return queries.view(rows, self.decoder.kv_heads, heads // self.decoder.kv_heads, tokens, size)

    def keys(self, x: Tensor, positions: Tensor) -> Keys:
        keys = self._heads(self.k_proj(x))
        keys = self.k_norm(keys) if self.decoder.qk_norm else keys
        return Keys(self._rotate(keys, positions), self._heads(self.v_proj(x)))

    def output(self, attended: Tensor) -> Tensor:
        mixed: Tensor = self.o_proj(attended.flatten(1, 2).transpose(1, 2).flatten(2))
        return mixed

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.decoder.head_dim).transpose(1, 2)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.decoder.head_dim // 2
        base = self.decoder.rope["rope_theta"]
        rates = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        angles = positions[:, None, :, None].float() * rates  # [rows, 1, tokens, half]
        cos, sin = angles.cos(), angles.sin()
        first, second = x.float().chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, decoder: Decoder, width: int | None = None) -> None:
        super().__init__()
        self.self_attn = Attention(decoder, width or decoder.hidden)
        sizes = LlamaConfig(hidden_size=decoder.hidden, intermediate_size=decoder.ffn, num_attention_heads=1)
        self.mlp = LlamaMLP(sizes)
        self.input_layernorm = Norm(decoder.hidden, decoder.eps)
        self.post_attention_layernorm = Norm(decoder.hidden, decoder.eps)

    def after(self, residual: Tensor, attended: Tensor) -> Tensor:
        x = residual + self.self_attn.output(attended)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def scores_of(queries: Tensor, keys: Tensor) -> Tensor:
    """float32 [rows, kv heads, heads of each, queries, keys]"""
    return (queries @ keys.unsqueeze(2).transpose(-1, -2)).float()
