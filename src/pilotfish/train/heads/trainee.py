from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from pilotfish.model.heads.families.medusa import MedusaHead
from pilotfish.model.heads.spec import Decoder, Projection


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


@dataclass(frozen=True)
class Lesson:
    tokens: Tensor  # int64 [rows, length]
    positions: Tensor  # int64 [rows, length]
    places: Tensor  # int64 [rows, starts]: indices of the last committed token, below which chains are guessed
    states: Tensor  # [rows, length, parts * target width]: those of the projection's layers


@dataclass(frozen=True)
class Chains:
    logits: list[Tensor]  # for each depth [rows, starts, draft vocabulary]
    confidence: list[Tensor]  # for each depth [rows, starts], logits of being accepted; or none


@dataclass(frozen=True)
class Shared:
    embedding: Tensor  # [vocabulary, hidden]
    output: Tensor  # [draft vocabulary, hidden]
    norm: Tensor  # [hidden]: of its last norm
    layers: Sequence[Mapping[str, Tensor]]  # its decoder layers, by names within the layer; none: unlike a head's


class Trainee(nn.Module):
    """A head in training. The names of its parameters are those of `model/heads/spec.py`."""

    def __init__(self, projection: Projection, shared: Shared) -> None:
        super().__init__()
        self.projection, self.shared = projection, shared
        width = shared.embedding.shape[1]
        parts = len(projection.layers)
        if projection.joined_norm:
            self.input_norm = Norm(parts * width, projection.eps)
        if projection.fc:
            self.fc = nn.Linear(parts * width, projection.width, bias=projection.bias)
        if projection.feature_norm:
            self.feature_norm = Norm(projection.width, projection.eps)

    def forward(self, lesson: Lesson) -> Chains:
        raise NotImplementedError

    def features(self, states: Tensor) -> Tensor:
        projection = self.projection
        states = self.input_norm(states) if projection.joined_norm else states
        states = self.fc(states) if projection.fc else states
        return self.feature_norm(states) if projection.feature_norm else states

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.shared.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.shared.output)


def start(trainee: Trainee, depth: int, seed: int) -> None:
    """Layers start as the target's last ones, if shapes are equal; all else is small and random, norms are ones."""
    generator, shared = torch.Generator().manual_seed(seed), trainee.shared
    for name, parameter in trainee.named_parameters():
        if parameter.ndim == 1:
            value = torch.full(parameter.shape, 0.0 if name.endswith("bias") else 1.0)
        else:
            value = torch.randn(parameter.shape, generator=generator) * 0.02
        if name == "fc.weight" and parameter.shape[0] <= parameter.shape[1]:
            value[:, -len(value) :] += torch.eye(len(value))
        taken = _of_target(name, parameter.shape, shared, depth)
        parameter.data.copy_(value if taken is None else taken)


def _of_target(name: str, shape: torch.Size, shared: Shared, depth: int) -> Tensor | None:
    if name.endswith("lm_head.weight"):
        return shared.output
    if name == "norm.weight":
        return shared.norm
    if not shared.layers or not name.startswith("layers."):
        return None
    _, index, rest = name.split(".", 2)
    first, own = shared.layers[0].get(rest), shared.layers[int(index) - depth].get(rest)
    if first is None or own is None:
        return None
    # A head that is twice as wide gets the embedding, as the first layer does, beside the feature.
    value = own if own.shape == shape else torch.cat((first, own), -1)
    return value if value.shape == shape else None


class DepthHead(nn.Module):
    def __init__(self, head: MedusaHead, output: Tensor) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(head.hidden, head.hidden, bias=head.bias) for _ in range(head.blocks))
        self.lm_head = nn.Linear(head.hidden, len(output), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + F.silu(block(x))
        logits: Tensor = self.lm_head(x)
        return logits


class ParallelTrainee(Trainee):
    """Places of a lesson are 1, 2, …: what is guessed below a token comes of the feature before it."""

    def __init__(self, head: MedusaHead, shared: Shared) -> None:
        super().__init__(head.projection, shared)
        self.heads = nn.ModuleList(DepthHead(head, shared.output) for _ in range(head.heads))

    def forward(self, lesson: Lesson) -> Chains:
        feature = self.features(lesson.states[:, : lesson.places.shape[1]])
        return Chains([head(feature) for head in self.heads], [])
