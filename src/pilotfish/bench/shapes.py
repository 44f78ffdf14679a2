"""Llamas of known shapes with random weights: the cost of a forward does not depend on its weights."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from pilotfish.config.fields import Quantization
from pilotfish.engine.pairs import resolve_pair
from pilotfish.model.loading.loader import LoadedModel, load_model

VOCAB = 8192
HEAD_DIM = 64
MAX_CONTEXT = 4096  # positions


def llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> LlamaConfig:
    """Layers, and widths of the residual stream, the heads and the FFN. Input and output embeddings are two matrices
    of `VOCAB` rows; a head has `HEAD_DIM`."""
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


#: Named by their parameters; the draft has 5.6 M.
SHAPES = {
    "88m": llama(layers=12, hidden=768, heads=12, kv_heads=4, ffn=2048),
    "344m": llama(layers=24, hidden=1024, heads=16, kv_heads=4, ffn=3584),
    "draft": llama(layers=2, hidden=256, heads=4, kv_heads=2, ffn=640),
}
#: As many layers as a model of 8 B has, with 7.3 M parameters.
DEEP = llama(layers=32, hidden=128, heads=2, kv_heads=2, ffn=256)

TARGETS = ("88m", "344m")


def random_model(
    shape: LlamaConfig,
    dtype: torch.dtype,
    device: torch.device,
    quantization: Quantization = "none",
) -> LoadedModel:
    """Random weights, loaded as any other model is; they pass through a temporary directory."""
    with tempfile.TemporaryDirectory() as directory:
        write_random_model(shape, dtype, directory)
        return load_model(Path(directory), dtype, device, eager=False, quantization=quantization)


def write_random_model(shape: LlamaConfig, dtype: torch.dtype, directory: str) -> None:
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    LlamaForCausalLM(shape).to(dtype).save_pretrained(directory)


def write_served_model(shape: LlamaConfig, dtype: torch.dtype, directory: Path) -> None:
    """One that engines serve: with the bundled pair's tokenizer, which has fewer tokens."""
    write_random_model(shape, dtype, str(directory))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_pair("pycode").target / name, directory)


def multiplied_weights(shape: LlamaConfig) -> int:
    """Weights that a row is multiplied with: those of the linear layers, the output embedding's among them."""
    with torch.device("meta"):
        module = LlamaForCausalLM(shape)
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, torch.nn.Linear))
