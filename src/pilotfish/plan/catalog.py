"""Accelerators by their vendors' figures, and public dense models by their published configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    memory: float  # bytes
    bandwidth: float  # bytes a second
    bf16: float  # operations a second of its matrix units, without sparsity
    fp8: float | None = None  # likewise; None: no units for it


#: A vendor's sheet often prints peaks with sparsity, twice these.
DEVICES: Mapping[str, Device] = {
    "a100": Device(80e9, 2.0e12, 312e12),  # the SXM module of 80 GB
    "h100": Device(80e9, 3.35e12, 989e12, 1979e12),  # SXM
    "h200": Device(141e9, 4.8e12, 989e12, 1979e12),  # SXM
    "b200": Device(192e9, 8.0e12, 2250e12, 4500e12),  # HGX, 1000 W
    "gb200": Device(186e9, 8.0e12, 2500e12, 5000e12),  # one of its GPUs; memory unverified
    "l40s": Device(48e9, 0.864e12, 362e12, 733e12),
    "mi300x": Device(192e9, 5.3e12, 1307e12, 2615e12),  # FP8 unverified
    "mi355x": Device(288e9, 8.0e12, 2500e12, 5000e12),  # BF16 unverified
    "tpu-v5e": Device(16e9, 0.819e12, 197e12),
    "tpu-v6e": Device(32e9, 1.638e12, 918e12, 918e12),
    "tpu-v7": Device(206e9, 7.38e12, 2307e12, 4614e12),  # bandwidth unverified
    "trainium2": Device(103e9, 2.9e12, 667e12, 1299e12),
    "xeon-6980p": Device(3072e9, 0.845e12, 524e12),  # AMX peak derived from cores and clock; memory unverified
}


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
        """Number of weights in all layers."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn)

    @property
    def head(self) -> int:
        """Number of weights in the output embedding."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        return self.body + self.head * (1 if self.tied else 2)

    @property
    def kv_values(self) -> int:
        """Numbers that the KV cache keeps for a token."""
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
