"""Llama shapes that forwards are timed on, with random weights: what a forward costs does not depend on them."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from pilotfish.config import Quantization
from pilotfish.model.loader import LoadedModel, load_model

VOCAB = 8192
HEAD_DIM = 64
CONTEXT = 4096  # positions


@dataclass(frozen=True)
class LlamaShape:
    """Layers, and widths of the residual stream, the heads and the FFN. Input and output embeddings are two matrices
    of `VOCAB` rows; a head has `HEAD_DIM`."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=self.hidden,
            intermediate_size=self.ffn,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=HEAD_DIM,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )

    def read_bytes(self, context: int, element_size: int) -> int:
        """What a step reads at least, once each: weights less the input embedding, and KV of `context` positions."""
        attention = 2 * self.hidden * HEAD_DIM * (self.heads + self.kv_heads)
        norms = 2 * self.hidden
        kv = 2 * self.kv_heads * HEAD_DIM * context
        layer = attention + 3 * self.hidden * self.ffn + norms + kv
        return element_size * (self.layers * layer + self.hidden + VOCAB * self.hidden)


#: Named by their parameters; the draft has 5.6 M.
SHAPES = {
    "88m": LlamaShape(layers=12, hidden=768, heads=12, kv_heads=4, ffn=2048),
    "344m": LlamaShape(layers=24, hidden=1024, heads=16, kv_heads=4, ffn=3584),
    "draft": LlamaShape(layers=2, hidden=256, heads=4, kv_heads=2, ffn=640),
}


def random_model(
    shape: LlamaShape,
    dtype: torch.dtype,
    device: torch.device,
    *,
    eager: bool = False,
    quantization: Quantization = "none",
) -> LoadedModel:
    """Random weights, loaded as any other model is; they pass through a temporary directory."""
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    model = LlamaForCausalLM(shape.config()).to(dtype)
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        return load_model(Path(directory), dtype, device, eager=eager, quantization=quantization)
