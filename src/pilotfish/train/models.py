"""Models that are trained, or that teach: how they are built, trained on and sampled from."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pilotfish.train.data import Tokens
from pilotfish.train.recipe import HEAD_DIM, LlamaSize

PROMPT = 64  # corpus tokens before each continuation
SAMPLED_ROWS = 64  # continuations written at once

#: By another name, for which transformers makes no mask: it would read a gap between positions as the start of another
#: document, but training uses gaps to show the models long distances in short rows.
ATTENTION = "pilotfish_training"
AttentionInterface.register(ATTENTION, sdpa_attention_forward)


def build_model(size: LlamaSize, vocab_size: int, context: int, seed: int) -> LlamaForCausalLM:
    """A freshly initialised model in float32 whose input and output embeddings are one matrix."""
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
    """Give a draft as wide as its target the target's embeddings, norm and evenly spaced layers."""
    layers, last = len(draft.model.layers), len(target.model.layers) - 1
    chosen = [target.model.layers[round(index * last / max(1, layers - 1))] for index in range(layers)]
    untrained = (draft.model.embed_tokens, draft.model.norm, *draft.model.layers)
    trained = (target.model.embed_tokens, target.model.norm, *chosen)
    for to, source in zip(untrained, trained, strict=True):
        if [p.shape for p in to.parameters()] == [p.shape for p in source.parameters()]:
            to.load_state_dict(source.state_dict())


def predict(model: Any, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    """Logits float32 [rows, length, vocabulary] of what follows each of `tokens` [rows, length + 1] but the last.
    Without `positions` [rows, length] they count from 0."""
    inputs = tokens[:, :-1]
    # With a mask positions that jump are not read as the start of another document.
    result = model(input_ids=inputs, position_ids=positions, attention_mask=torch.ones_like(inputs), use_cache=False)
    logits: Tensor = result.logits.float()
    return logits


@torch.no_grad()
def sample_text(
    target: LlamaForCausalLM, tokens: Tokens, length: int, total: int, seed: int, progress: Progress
) -> Tokens:
    """About `total` tokens [tokens] that the target writes: rows of `length`, corpus prompts included, end to end."""
    target.eval()
    torch.manual_seed(seed)
    generator = np.random.default_rng((seed, 2))
    rows: list[Tokens] = []
    batches = -(-total // (length * SAMPLED_ROWS))
    for _ in progress.track(range(batches), description="sampling from the target"):
        starts = generator.integers(len(tokens) - PROMPT, size=SAMPLED_ROWS)
        prompts = np.stack([tokens[start : start + PROMPT] for start in starts])
        rows.append(continue_prompts(target, prompts, length - PROMPT, 1.0))
    return np.concatenate(rows).reshape(-1)


def continue_prompts(target: Any, prompts: Tokens, count: int, temperature: float) -> Tokens:
    """Prompts [rows, length] with `count` tokens sampled behind each: [rows, length + count].

    Documents that end are followed by another, as in the corpus, so every row comes out full.
    """
    inputs = torch.from_numpy(prompts.astype(np.int64)).to(target.device)
    written = target.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=count,
        eos_token_id=[],
        **_sampling(temperature),
    )
    result: Tokens = written.cpu().numpy().astype(prompts.dtype)
    return result


def answer_prompts(target: Any, prompts: Sequence[Tokens], length: int, temperature: float) -> list[Tokens]:
    """Prompts [tokens] of at most `length` less one, each with its answer, of at most `length` tokens together. An
    answer ends with the end token."""
    longest = max(map(len, prompts))
    inputs = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(inputs)
    for row, prompt in enumerate(prompts):
        inputs[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, longest - len(prompt) :] = 1
    ends = np.atleast_1d(target.generation_config.eos_token_id)  # transformers has one or several
    written = target.generate(
        inputs.to(target.device),
        attention_mask=mask.to(target.device),
        max_new_tokens=length - longest,
        pad_token_id=target.generation_config.pad_token_id,
        **_sampling(temperature),
    )
    answers = written[:, longest:].cpu().numpy()
    lengths = [next(iter(np.flatnonzero(np.isin(answer, ends)) + 1), len(answer)) for answer in answers]
    return [
        np.concatenate((prompt, answer[:end].astype(prompt.dtype)))
        for prompt, answer, end in zip(prompts, answers, lengths, strict=True)
    ]


def _sampling(temperature: float) -> dict[str, Any]:
    if not temperature:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
