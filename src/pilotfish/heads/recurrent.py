"""The module of EAGLE's and MTP's heads: a state and the embedding of the token after it give the next state."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pilotfish.heads.parts import Angles, HeadLayer, Parts, RotatedRows, normed
from pilotfish.heads.spec import RecurrentHead
from pilotfish.model.attention import AttentionMetadata
from pilotfish.model.kv_planes import KVPool


@dataclass(frozen=True)
class RecurrentStep:
    states: Tensor  # [rows, hidden], for the rows below
    logits: Tensor  # [kept rows, draft vocab]


class RecurrentModule(torch.nn.Module):
    def __init__(self, head: RecurrentHead, parts: Parts, words: Tensor | slice, *, eager: bool) -> None:
        """`words`: the rows of `lm_head` that are used, in this order."""
        super().__init__()
        decoder = head.decoder
        self.zero_first, self.recycles_normed = head.zero_first_embedding, head.recycles_normed
        self.embedding = parts.tensor("embed_tokens.weight")
        self.angles = Angles(decoder, parts.dtype, parts.device)
        self.entry = WideEntry(head, parts) if head.entry == "wide" else JoinedEntry(head, parts)
        self.layers = torch.nn.ModuleList(HeadLayer(parts, decoder, i, eager=eager) for i in range(decoder.layers))
        self.norm = parts.norm("norm", decoder)
        self.lm_head = parts.product(parts.affine("lm_head", words))

    def forward(
        self,
        tokens: Tensor,  # [rows]
        states: Tensor,  # [rows, hidden], of the token before each; written to
        keep: Tensor,  # [kept rows]
        metadata: AttentionMetadata,
        kv: KVPool,
    ) -> RecurrentStep:
        """Writes KV. All positions are within reach of the angles."""
        positions = metadata.row_positions.clamp(min=0)
        embedded = self.embedding.index_select(0, tokens)
        if self.zero_first:
            embedded = embedded.masked_fill((positions == 0)[:, None], 0.0)
        rows = RotatedRows(*self.angles(positions), metadata)
        residual, entering = self.entry(embedded, states)
        for layer, planes in zip(self.layers, kv, strict=True):
            residual, entering = layer(residual, entering, rows, planes), None
        if self.recycles_normed:
            residual = normed(self.norm, residual)
        kept = residual.index_select(0, keep)
        if not self.recycles_normed:
            kept = normed(self.norm, kept)
        return RecurrentStep(residual, self.lm_head(kept))


class WideEntry(torch.nn.Module):
    """EAGLE-3's: attention of the first layer sees both, side by side."""

    def __init__(self, head: RecurrentHead, parts: Parts) -> None:
        super().__init__()
        self.residual_normed = head.residual_normed
        self.embed_norm = parts.norm("layers.0.input_layernorm", head.decoder)
        self.state_norm = parts.norm("hidden_norm", head.decoder)

    def forward(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The residual [rows, hidden] and what enters attention [rows, 2 * hidden]."""
        state = normed(self.state_norm, states)
        entering = torch.cat((normed(self.embed_norm, embedded), state), dim=-1)
        return (state if self.residual_normed else states), entering


class JoinedEntry(torch.nn.Module):
    """EAGLE-1's and MTP's: a product makes one of both."""

    def __init__(self, head: RecurrentHead, parts: Parts) -> None:
        super().__init__()
        self.hidden_first = head.hidden_first
        self.embed_norm = parts.norm("embed_norm", head.decoder)
        self.state_norm = parts.norm("hidden_norm", head.decoder)
        self.product = parts.product(parts.affine("input_proj"))

    def forward(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, None]:
        """The residual [rows, hidden]."""
        both = normed(self.embed_norm, embedded), normed(self.state_norm, states)
        return self.product(torch.cat(both[::-1] if self.hidden_first else both, dim=-1)), None
