import warnings
from pathlib import Path
from typing import Any

import openvino
import torch
from torch import Tensor
from transformers import AttentionInterface

from pilotfish.errors import ModelError
from pilotfish.model.cuda.graphs import recordable
from pilotfish.model.loading.configuration import ARCHITECTURES, layer_windows
from pilotfish.model.loading.loader import LoadedModel
from pilotfish.model.loading.metadata import quiet

#: Added to a score that a row must not see. Half precision has it, too.
UNSEEN = -3e4


class StatelessModel(torch.nn.Module):
    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__()
        module: Any = loaded.module
        module.config._attn_implementation = "pilotfish_stateless"
        self.model = module

    def forward(
        self,
        tokens: Tensor,  # int64 [rows]
        positions: Tensor,  # int64 [rows]
        kept: Tensor,  # int64 [kept]
        unseen: Tensor,  # [rows, earlier + rows], 0 where a row sees a column, else UNSEEN
        keys: Tensor,  # [layers, kv_heads, earlier, head_dim]
        values: Tensor,  # likewise
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [kept, vocab]; keys and values of the rows [layers, kv_heads, rows, head_dim]."""
        fresh: list[tuple[Tensor, Tensor]] = []
        output = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            logits_to_keep=kept,
            use_cache=False,
            unseen=unseen,
            earlier=(keys, values),
            fresh=fresh,
        )
        new_keys, new_values = (torch.stack(layers) for layers in zip(*fresh, strict=True))
        return output.logits.squeeze(0), new_keys, new_values


def stateless_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, heads, rows, head_dim]
    key: Tensor,  # [1, kv_heads, rows, head_dim]
    value: Tensor,  # likewise
    attention_mask: Tensor | None,  # noqa: ARG001
    scaling: float,
    unseen: Tensor,
    earlier: tuple[Tensor, Tensor],
    fresh: list[tuple[Tensor, Tensor]],
    softcap: float | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """transformers calls it in each layer. Returns [1, rows, heads, head_dim]; appends the rows' keys and values to
    `fresh`. Earlier tokens and rows are scored apart, so that no KV is copied."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    key, value = key.squeeze(0), value.squeeze(0)
    fresh.append((key, value))
    past_keys, past_values = (planes[layer] for planes in earlier)  # [kv_heads, earlier, head_dim]
    heads, head_dim, kv_heads = query.shape[1], query.shape[3], key.shape[0]
    grouped = (query.squeeze(0) * scaling).reshape(kv_heads, -1, head_dim)  # [kv_heads, groups x rows, head_dim]
    scores = torch.cat((grouped @ past_keys.transpose(1, 2), grouped @ key.transpose(1, 2)), dim=-1)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    rows, columns = unseen.shape[0], unseen.shape[1]
    weights = (scores.reshape(heads, rows, columns) + unseen).softmax(dim=-1).reshape(kv_heads, -1, columns)
    before = past_keys.shape[1]
    output = weights[:, :, :before] @ past_values + weights[:, :, before:] @ value
    return output.reshape(heads, rows, head_dim).transpose(0, 1)[None], None


def refuse_untraceable(config: Any, directory: Path) -> None:
    """ModelError for a model whose operations depend on its rows' values, or with windows."""
    if any(layer_windows(config)):
        raise ModelError(f"model: {directory} has layers with sliding windows; backend openvino has no such layers")
    if ARCHITECTURES[config.architectures[0]].get("experts") or not recordable(config):
        raise ModelError(f"model: {directory} has experts or dynamic rotary embeddings; backend openvino has neither")


AttentionInterface.register("pilotfish_stateless", stateless_attention)


def converted(loaded: LoadedModel) -> Any:
    config, rows, before = loaded.config, 3, 5
    past = torch.zeros(config.num_hidden_layers, config.num_key_value_heads, before, config.head_dim)
    order = torch.arange(rows)
    example = (order, before + order, order[1:], torch.zeros(rows, before + rows), past, past)
    with quiet(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a trace warns of all that it takes for fixed: sizes of layers and heads
        return openvino.convert_model(StatelessModel(loaded), example_input=example)
