"""A forward of a plain decode loop, for torch.compile: `rows` sequences of one token each, greedy, without trees."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig


class PlainDecode:
    """Random weights, and a static cache of `context` tokens and the new one. Returns int64 [rows]."""

    def __init__(self, shape: LlamaConfig, rows: int, context: int, dtype: torch.dtype, device: torch.device) -> None:
        def normal(*size: int) -> Tensor:
            return torch.randn(size, dtype=dtype, device=device) * 0.02

        heads, kv_heads, head_dim = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        hidden, inner, joined = shape.hidden_size, shape.intermediate_size, (heads + 2 * kv_heads) * head_dim
        sizes = (joined, hidden), (hidden, heads * head_dim), (2 * inner, hidden), (hidden, inner)
        cache = 2, rows, kv_heads, context + 1, head_dim
        self.layers = [[*(normal(*size) for size in sizes), normal(*cache)] for _ in range(shape.num_hidden_layers)]
        self.embedding, self.head = normal(shape.vocab_size, hidden), normal(shape.vocab_size, hidden)
        self.tokens, self.angles = torch.arange(rows, device=device), normal(2, head_dim)
        self.layer: Callable[..., Tensor] = partial(_layer, (heads, kv_heads, head_dim))

    def __call__(self) -> Tensor:
        x = self.embedding[self.tokens]
        for tensors in self.layers:
            x = self.layer(x, self.angles, *tensors)
        return F.linear(_normed(x), self.head).argmax(dim=-1)


def _layer(
    shape: tuple[int, int, int],  # heads, KV heads, and the size of a head
    x: Tensor,  # [rows, hidden]
    angles: Tensor,  # [2, head_dim], cosines and sines
    qkv: Tensor,
    out: Tensor,
    gate_up: Tensor,
    down: Tensor,
    kv: Tensor,  # [2, rows, KV heads, positions, head_dim]
) -> Tensor:
    heads, kv_heads, head_dim = shape
    rows = F.linear(_normed(x), qkv).view(len(x), -1, 1, head_dim)
    q, k, v = rows[:, :heads], rows[:, heads : heads + kv_heads], rows[:, heads + kv_heads :]
    kv[0, :, :, -1:], kv[1, :, :, -1:] = _rotated(k, angles), v
    attended = F.scaled_dot_product_attention(_rotated(q, angles), kv[0], kv[1], enable_gqa=True)
    x = x + F.linear(attended.reshape(len(x), -1), out)
    gate, up = F.linear(_normed(x), gate_up).chunk(2, dim=-1)
    return x + F.linear(F.silu(gate) * up, down)


def _rotated(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * angles[0] + torch.cat((-second, first), dim=-1) * angles[1]


def _normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:])
