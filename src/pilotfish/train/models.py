"""The two Llama models of a pair: how they are built, trained on and sampled from."""

import numpy as np
import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from pilotfish.train.data import Tokens
from pilotfish.train.recipe import HEAD_DIM, LlamaSize

ATTENTION = "pilotfish_training"
PROMPT = 64  # corpus tokens before each continuation
SAMPLED_ROWS = 64  # continuations written at once


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
    return LlamaForCausalLM(config)


def start_from_target(draft: LlamaForCausalLM, target: LlamaForCausalLM) -> None:
    """Give a draft as wide as its target the target's embeddings, norm and evenly spaced layers."""
    layers, last = len(draft.model.layers), len(target.model.layers) - 1
    chosen = [target.model.layers[round(index * last / max(1, layers - 1))] for index in range(layers)]
    untrained = (draft.model.embed_tokens, draft.model.norm, *draft.model.layers)
    trained = (target.model.embed_tokens, target.model.norm, *chosen)
    for to, source in zip(untrained, trained, strict=True):
        if [p.shape for p in to.parameters()] == [p.shape for p in source.parameters()]:
            to.load_state_dict(source.state_dict())


def use_training_attention(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Attend by row order whatever the positions say.

    transformers reads a gap between positions as the start of another document; training uses gaps to
    show the models long distances in short rows, so its attention has to ignore them.
    """
    model.set_attn_implementation(ATTENTION)
    return model


def logits(model: LlamaForCausalLM, tokens: Tensor, positions: Tensor) -> Tensor:
    """Next-token logits float32 [rows, length, vocabulary] of tokens [rows, length] at the given positions."""
    hidden = model.model(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
    result: Tensor = model.lm_head(hidden).float()
    return result


def _causal_attention(
    _: nn.Module, query: Tensor, key: Tensor, value: Tensor, *__: object, **___: object
) -> tuple[Tensor, None]:
    """query, key, value [rows, heads, length, head_dim] -> [rows, length, heads, head_dim]."""
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _causal_attention)


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
    target.set_attn_implementation("sdpa")
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    inputs = torch.from_numpy(prompts.astype(np.int64)).to(target.device)
    written = target.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=count,
        min_new_tokens=0,
        eos_token_id=[],
        **(sampling if temperature else {"do_sample": False}),
    )
    result: Tokens = written.cpu().numpy().astype(np.uint16)
    return result
