import copy
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, GenerationConfig, LlamaConfig, LlamaForCausalLM, StoppingCriteria
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pilotfish.model.loading.metadata import quiet
from pilotfish.progress import Advance
from pilotfish.train.recipes import HEAD_DIM, LlamaSize
from pilotfish.train.text.data import Tokens

#: By another name, for which transformers makes no mask: it would read a gap between positions as the start of another
#: document, but training uses gaps to show the models long distances in short rows.
ATTENTION = "pilotfish_training"
AttentionInterface.register(ATTENTION, sdpa_attention_forward)

SHARD_SIZE = "15MB"  # files stay under 16 MiB


def build_model(size: LlamaSize, vocab_size: int, context: int, seed: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config)
    model.set_attn_implementation(ATTENTION)
    return model


def start_from_target(draft: LlamaForCausalLM, target: LlamaForCausalLM) -> None:
    layers, last = len(draft.model.layers), len(target.model.layers) - 1
    chosen = [target.model.layers[round(index * last / max(1, layers - 1))] for index in range(layers)]
    untrained = (draft.model.embed_tokens, draft.model.norm, *draft.model.layers)
    trained = (target.model.embed_tokens, target.model.norm, *chosen)
    for to, source in zip(untrained, trained, strict=True):
        if [p.shape for p in to.parameters()] == [p.shape for p in source.parameters()]:
            to.load_state_dict(source.state_dict())


def predict(model: Any, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    """Logits float32 [rows, length, vocabulary] behind each of `tokens` [rows, length + 1] but the last."""
    inputs = tokens[:, :-1]
    # With a mask positions that jump are not read as the start of another document.
    result = model(input_ids=inputs, position_ids=positions, attention_mask=torch.ones_like(inputs), use_cache=False)
    logits: Tensor = result.logits.float()
    return logits


class WrittenTokens(StoppingCriteria):  # type: ignore[misc]
    """`total` counts tokens of all rows, prompts included. Stops nothing."""

    def __init__(self, total: int, steps: int, advance: Advance) -> None:
        self._parts: Iterator[int] = iter(np.diff(np.linspace(0, total, steps + 1).astype(int)).tolist())
        self._advance = advance

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:  # noqa: ARG002
        self._advance(next(self._parts))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def rest(self) -> None:
        self._advance(sum(self._parts))


@torch.no_grad()
def write_on(
    target: Any,
    prompts: Sequence[Tokens],
    length: int,
    temperature: float,
    advance: Advance,
    *,
    to_the_end: bool = False,
) -> list[Tokens]:
    """Continues prompts [tokens] of less than `length`: as far as the longest has room, or `to_the_end`, the token
    included."""
    longest = max(map(len, prompts))
    inputs = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(inputs)
    for row, prompt in enumerate(prompts):
        inputs[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, longest - len(prompt) :] = 1
    generation, told = target.generation_config, WrittenTokens(len(prompts) * length, length - longest, advance)
    ends = np.atleast_1d(generation.eos_token_id).tolist() if to_the_end else []  # transformers has one or several
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    written = target.generate(
        inputs.to(target.device),
        attention_mask=mask.to(target.device),
        max_new_tokens=length - longest,
        eos_token_id=ends,
        pad_token_id=generation.pad_token_id,
        stopping_criteria=[told],
        **(sampling if temperature else {"do_sample": False}),
    )
    told.rest()
    rows = written[:, longest:].cpu().numpy()
    lengths = [next(iter(np.flatnonzero(np.isin(row, ends)) + 1), len(row)) for row in rows]
    return [
        np.concatenate((prompt, row[:end].astype(prompt.dtype)))
        for prompt, row, end in zip(prompts, rows, lengths, strict=True)
    ]


def export_model(model: Any, tokenizer: Any, generation: GenerationConfig, directory: Path) -> None:
    """In bfloat16; replaces the directory."""
    shutil.rmtree(directory, ignore_errors=True)
    stored = copy.deepcopy(model).bfloat16()
    stored.generation_config = generation
    with quiet():
        stored.save_pretrained(directory, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(directory)
    for path in directory.glob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes files for their owner alone
