"""The two Llama models of a pair: how they are built, trained on and sampled from."""

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


def predict(model: LlamaForCausalLM, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    """Logits float32 [rows, length, vocabulary] of what follows each of `tokens` [rows, length + 1] but the last.
    Without `positions` [rows, length] they count from 0."""
    result: Tensor = model(input_ids=tokens[:, :-1], position_ids=positions, use_cache=False).logits.float()
    return result


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


def continue_prompts(target: LlamaForCausalLM, prompts: Tokens, count: int, temperature: float) -> Tokens:
    """Prompts [rows, length] with `count` tokens sampled behind each: [rows, length + count].

    Documents that end are followed by another, as in the corpus, so every row comes out full.
    """
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    inputs = torch.from_numpy(prompts.astype(np.int64)).to(target.device)
    written = target.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=count,
        eos_token_id=[],
        **(sampling if temperature else {"do_sample": False}),
    )
    result: Tokens = written.cpu().numpy().astype(np.uint16)
    return result
