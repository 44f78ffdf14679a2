"""Llamas of known shapes with random weights, whose forwards cost what trained ones do; and the rows of a step."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from pilotfish.core.scheduling.executor import NO_NODES, NodeRows, SequenceRows
from pilotfish.core.trees.tree import Guesses
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.loading.loader import LoadedModel, load_model

VOCAB = 8192
HEAD_DIM = 64
CONTEXT = 256  # tokens before a step


def llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> LlamaConfig:
    """Input and output embeddings are two matrices of `VOCAB` rows."""
    return LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


#: Named by their parameters.
SHAPES = {
    "88m": llama(layers=12, hidden=768, heads=12, kv_heads=4, ffn=2048),
    "344m": llama(layers=24, hidden=1024, heads=16, kv_heads=4, ffn=3584),
}


def random_model(shape: LlamaConfig, dtype: torch.dtype, device: torch.device) -> LoadedModel:
    """Random weights, loaded as any other model is; they pass through a temporary directory."""
    with tempfile.TemporaryDirectory() as directory:
        write_random_model(shape, dtype, directory)
        return load_model(Path(directory), dtype, device, eager=False)


def write_random_model(shape: LlamaConfig, dtype: torch.dtype, directory: str) -> None:
    transformers_logging.disable_progress_bar()
    torch.manual_seed(0)
    LlamaForCausalLM(shape).to(dtype).save_pretrained(directory)


def step_rows(executor: TorchExecutor, rows: int) -> SequenceRows:
    """The step of `context_and_tree`, whose context this computes."""
    before, step = context_and_tree(rows, executor.model.config.vocab_size)
    executor.forward([before])
    return step


def context_and_tree(rows: int, vocab_size: int) -> tuple[SequenceRows, SequenceRows]:
    """`CONTEXT` tokens; then a token and a tree below it, `rows` together. Slots count up from 0."""
    prefix = np.arange(CONTEXT + 1, dtype=np.int32)
    prompt = [1 + token % (vocab_size - 1) for token in range(CONTEXT + 1)]
    tree = Guesses()
    for node in range(rows - 1):
        tree.add(node // 4 - 1, (node + 1) % vocab_size, -float(node + 1))
    nodes = NodeRows.of(tree.tree(), np.arange(CONTEXT + 1, CONTEXT + rows, dtype=np.int32))
    before = SequenceRows(0, prompt[:CONTEXT], prefix[:CONTEXT], NO_NODES, kept=[CONTEXT - 1])
    return before, SequenceRows(CONTEXT, prompt[CONTEXT:], prefix, nodes, kept=[0])
