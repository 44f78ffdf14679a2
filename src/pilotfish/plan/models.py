"""Shapes of public dense models, from their published configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DenseModel:
    """A pre-norm decoder with grouped-query attention and gated MLPs. Norms and biases are not counted."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied: bool = False  # input and output embeddings are one matrix

    @property
    def body(self) -> int:
        """Weights of all layers."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn)

    @property
    def head(self) -> int:
        """Weights of the output embedding."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        return self.body + self.head * (1 if self.tied else 2)

    @property
    def kv_values(self) -> int:
        """Numbers that the KV cache keeps of a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim


#: Qwen3-0.6B's, 4B's and 32B's head size is not hidden / heads: 128 gives their published parameter counts.
MODELS: Mapping[str, DenseModel] = {
    "llama-3.2-1b": DenseModel(16, 2048, 32, 8, 64, 8192, 128256, tied=True),
    "llama-3.2-3b": DenseModel(28, 3072, 24, 8, 128, 8192, 128256, tied=True),
    "llama-3.1-8b": DenseModel(32, 4096, 32, 8, 128, 14336, 128256),
    "llama-3.1-70b": DenseModel(80, 8192, 64, 8, 128, 28672, 128256),
    "llama-3.3-70b": DenseModel(80, 8192, 64, 8, 128, 28672, 128256),
    "llama-3.1-405b": DenseModel(126, 16384, 128, 8, 128, 53248, 128256),
    "qwen2.5-0.5b": DenseModel(24, 896, 14, 2, 64, 4864, 151936, tied=True),
    "qwen2.5-1.5b": DenseModel(28, 1536, 12, 2, 128, 8960, 151936, tied=True),
    "qwen2.5-3b": DenseModel(36, 2048, 16, 2, 128, 11008, 151936, tied=True),
    "qwen2.5-7b": DenseModel(28, 3584, 28, 4, 128, 18944, 152064),
    "qwen2.5-14b": DenseModel(48, 5120, 40, 8, 128, 13824, 152064),
    "qwen2.5-32b": DenseModel(64, 5120, 40, 8, 128, 27648, 152064),
    "qwen2.5-72b": DenseModel(80, 8192, 64, 8, 128, 29568, 152064),
    "qwen3-0.6b": DenseModel(28, 1024, 16, 8, 128, 3072, 151936, tied=True),
    "qwen3-1.7b": DenseModel(28, 2048, 16, 8, 128, 6144, 151936, tied=True),
    "qwen3-4b": DenseModel(36, 2560, 32, 8, 128, 9728, 151936, tied=True),
    "qwen3-8b": DenseModel(36, 4096, 32, 8, 128, 12288, 151936),
    "qwen3-14b": DenseModel(40, 5120, 40, 8, 128, 17408, 151936),
    "qwen3-32b": DenseModel(64, 5120, 64, 8, 128, 25600, 151936),
}
