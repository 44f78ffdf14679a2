"""The module of EAGLE's and MTP's heads: a state and the embedding of the token after it give the next state. And that
module over KV of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from pilotfish.model.attention import AttentionMetadata
from pilotfish.model.batch import EXACT, Batch, library_buckets
from pilotfish.model.heads.executors.head_executor import DraftVocab, HeadSetup
from pilotfish.model.heads.modules.parts import Angles, HeadLayer, Parts, RotatedRows, kv_shape, normed, runs_packed
from pilotfish.model.heads.spec import HeadFiles, RecurrentHead
from pilotfish.model.kv_planes import KVPool, empty_kv


@dataclass(frozen=True)
class RecurrentStep:
    states: Tensor  # [rows, hidden], for the rows below
    outputs: Tensor  # [kept rows, hidden], after the last norm: what `lm_head` gets


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
        return RecurrentStep(residual, kept)


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


class RecurrentRows:
    """A module, and KV of its rows."""

    def __init__(self, files: HeadFiles, setup: HeadSetup) -> None:
        head = cast(RecurrentHead, files.spec.head)
        self.packed = runs_packed(setup.device, head.decoder.head_dim, eager=setup.eager)
        self.vocab = DraftVocab.of(files, len(files.tensors["embed_tokens.weight"]), setup)
        self.buckets = EXACT if self.packed else library_buckets(setup.device, setup.dtype)
        parts = Parts(files.tensors, setup.device, setup.dtype, packed=self.packed)
        self.module = RecurrentModule(head, parts, self.vocab.words, eager=setup.eager).eval()
        self.kv = empty_kv(kv_shape(head.decoder), setup.dtype, setup.num_slots, setup.device)
        self._device = setup.device

    def __call__(self, batch: Batch, states: Tensor) -> RecurrentStep:
        """states [rows, hidden], of the token before each; written to. Kept rows are padded as the batch's are."""
        self.module.angles.reach(int(batch.metadata.row_positions.max()) + 1)
        batch = batch.map(lambda tensor: tensor.to(self._device))
        step: RecurrentStep = self.module(batch.input_ids, states, batch.keep, batch.metadata, self.kv)
        return step
