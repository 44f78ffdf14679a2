"""Models that are trained, or that teach: how they are built, trained on and sampled from."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM, StoppingCriteria
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from pilotfish.progress import Advance, PhaseProgress
from pilotfish.train.recipe import HEAD_DIM, LlamaSize
from pilotfish.train.text.data import Tokens

PROMPT = 64  # corpus tokens before each continuation
SAMPLED_ROWS = 64  # continuations written at once
#: Phases.
OWN_TEXT, EVALUATION = "the target's text", "evaluation"

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


class WrittenTokens(StoppingCriteria):  # type: ignore[misc]
    """Tells of tokens while they are written, and stops nothing. `total` are those of all rows, prompts included."""

    def __init__(self, total: int, steps: int, advance: Advance) -> None:
        self._parts: Iterator[int] = iter(np.diff(np.linspace(0, total, steps + 1).astype(int)).tolist())
        self._advance = advance

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:  # noqa: ARG002
        self._advance(next(self._parts))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)

    def rest(self) -> None:
        """Rows have ended early."""
        self._advance(sum(self._parts))


@torch.no_grad()
def sample_text(
    target: LlamaForCausalLM, tokens: Tokens, length: int, total: int, seed: int, progress: PhaseProgress
) -> Tokens:
    """About `total` tokens [tokens] that the target writes: rows of `length`, corpus prompts included, end to end."""
    target.eval()
    torch.manual_seed(seed)
    generator = np.random.default_rng((seed, 2))
    rows: list[Tokens] = []
    batches = -(-total // (length * SAMPLED_ROWS))
    with progress.phase(OWN_TEXT, batches * length * SAMPLED_ROWS, "tokens") as advance:
        for _ in range(batches):
            starts = generator.integers(len(tokens) - PROMPT, size=SAMPLED_ROWS)
            prompts = np.stack([tokens[start : start + PROMPT] for start in starts])
            rows.append(continue_prompts(target, prompts, length - PROMPT, 1.0, advance))
    return np.concatenate(rows).reshape(-1)


def continue_prompts(
    target: Any, prompts: Tokens, count: int, temperature: float, advance: Advance | None = None
) -> Tokens:
    """Prompts [rows, length] with `count` tokens sampled behind each: [rows, length + count].

    Documents that end are followed by another, as in the corpus, so every row comes out full.
    """
    told = [] if advance is None else [WrittenTokens(len(prompts) * (prompts.shape[1] + count), count, advance)]
    inputs = torch.from_numpy(prompts.astype(np.int64)).to(target.device)
    written = target.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=count,
        eos_token_id=[],
        stopping_criteria=told,
        **_sampling(temperature),
    )
    result: Tokens = written.cpu().numpy().astype(prompts.dtype)
    return result


def answer_prompts(
    target: Any, prompts: Sequence[Tokens], length: int, temperature: float, advance: Advance
) -> list[Tokens]:
    """Prompts [tokens] of at most `length` less one, each with its answer, of at most `length` tokens together. An
    answer ends with the end token."""
    longest = max(map(len, prompts))
    inputs = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(inputs)
    for row, prompt in enumerate(prompts):
        inputs[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, longest - len(prompt) :] = 1
    told = WrittenTokens(len(prompts) * length, length - longest, advance)
    ends = np.atleast_1d(target.generation_config.eos_token_id)  # transformers has one or several
    written = target.generate(
        inputs.to(target.device),
        attention_mask=mask.to(target.device),
        max_new_tokens=length - longest,
        pad_token_id=target.generation_config.pad_token_id,
        stopping_criteria=[told],
        **_sampling(temperature),
    )
    told.rest()
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
