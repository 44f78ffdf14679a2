"""The two Llama models of a pair: their shapes, how they are built, and how they run while they train."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

ATTENTION = "pilotfish_training"
HEAD_DIM = 64


@dataclass(frozen=True)
class ModelShape:
    """A Llama's size: layers, and per layer the widths of the residual stream, the heads and the FFN."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int


def build_model(shape: ModelShape, vocab_size: int, context: int, seed: int) -> LlamaForCausalLM:
    """A freshly initialised model in float32 whose input and output embeddings are one matrix."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
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
    pairs: list[tuple[nn.Module, nn.Module]] = [
        (draft.model.embed_tokens, target.model.embed_tokens),
        (draft.model.norm, target.model.norm),
    ]
    for index, layer in enumerate(draft.model.layers):
        pairs.append((layer, target.model.layers[round(index * last / max(1, layers - 1))]))
    for to, source in pairs:
        if [p.shape for p in to.parameters()] == [p.shape for p in source.parameters()]:
            to.load_state_dict(source.state_dict())


def logits(model: LlamaForCausalLM, tokens: Tensor, positions: Tensor) -> Tensor:
    """Next-token logits [rows, length, vocabulary] of tokens [rows, length] at the given positions."""
    hidden = model.model(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
    result: Tensor = model.lm_head(hidden).float()
    return result


def for_training(model: LlamaForCausalLM, device: torch.device) -> LlamaForCausalLM:
    """The model on its device, attending by row order whatever the positions say.

    transformers reads a gap between positions as the start of another document; training uses gaps to
    show the models long distances in short rows, so its attention has to ignore them.
    """
    model.set_attn_implementation(ATTENTION)
    return model.to(device).train()


def _causal_attention(
    _: nn.Module, query: Tensor, key: Tensor, value: Tensor, *__: object, **___: object
) -> tuple[Tensor, None]:
    """query, key, value [rows, heads, length, head_dim] -> [rows, length, heads, head_dim]."""
    attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return attended.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _causal_attention)
