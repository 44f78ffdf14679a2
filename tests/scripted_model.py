"""A model on disk that says what a script tells it: each of its tokens has one token that follows it.

A turn's last token of the prompt, which the chat template writes, is a cue. The texts that follow a cue are tokens of
their own, and the last one is followed by the end of the sequence:

    … <assistant><cue:0> ─► "I look." ─► "\\n<tool_call>\\n{" ─► … ─► <eos>
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from support import VOCAB, edit_tensors, write_model
from transformers import AutoTokenizer


def write_scripted(directory: Path, script: Mapping[str, Sequence[str]], template: str, context: int) -> Path:
    """`script`: the texts that the model says after each cue, each text once."""
    texts = [*script, *(text for said in script.values() for text in said)]
    assert len(set(texts)) == len(texts)
    size = VOCAB + len(texts)
    options = {"vocab_size": size, "hidden_size": 2 * size, "max_position_embeddings": context}
    write_model(directory, "llama", **options, eos_token_id=0)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens(texts)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    follows = [0] * size
    for cue, said in script.items():
        chain = tokenizer.convert_tokens_to_ids([cue, *said])
        for token, following in pairwise(chain):
            follows[token] = following

    def teach(tensors: dict[str, torch.Tensor]) -> None:
        """All that blocks add is nothing, so what a token's row of logits sees is its embedding."""
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
        tensors["model.embed_tokens.weight"].zero_()[:, :size] = torch.eye(size)
        head = tensors["lm_head.weight"].zero_()
        head[follows, range(size)] = 1.0

    return edit_tensors(directory, teach)
