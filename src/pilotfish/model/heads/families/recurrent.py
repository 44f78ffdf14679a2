"""A row is (feature of t, token t + 1) and gives logits of t + 2. Below it its own state replaces the feature."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.core.features.features import Features
from pilotfish.core.scheduling.executor import Sampling, SequenceRows
from pilotfish.model.attention import AttentionMetadata
from pilotfish.model.batch import Batch, Forwarded
from pilotfish.model.heads.executor import DraftVocab, HeadExecutor, HeadLogits, HeadSetup, filled
from pilotfish.model.heads.parts import Angles, HeadLayer, Parts, RotatedRows, kv_shape, normed
from pilotfish.model.heads.spec import DecoderHead, HeadFiles, HeadSpec, Shapes
from pilotfish.model.kernels import Forward
from pilotfish.model.kv_planes import KVPool, empty_kv, zeros


@dataclass(frozen=True)
class RecurrentHead(DecoderHead):
    """A feature h and the embedding e of the token after it, as layer 0 gets them:

    wide     attention over [input_layernorm(e), hidden_norm(h)]; the residual is h or, with `residual_normed`,
             hidden_norm(h) (EAGLE-3)
    joined   x = input_proj([e, h]) or, with `hidden_first`, input_proj([h, e]), both normed before by `embed_norm` and
             `hidden_norm` where there are such (EAGLE-1, MTP)
    """

    entry: Literal["wide", "joined"]
    residual_normed: bool = False
    hidden_first: bool = False
    recycles_normed: bool = False  # whether the state that rows below get is the one after `norm`
    zero_first_embedding: bool = False  # that of position 0

    def shapes(self, spec: HeadSpec, vocab: int) -> Shapes:
        hidden = self.decoder.hidden
        shapes = super().shapes(spec, vocab) | self.decoder.shapes(wide=self.entry == "wide")
        shapes["hidden_norm.weight"] = (hidden,)
        if self.entry == "joined":
            shapes |= {"input_proj.weight": (hidden, 2 * hidden), "input_proj.bias": (hidden,)}
            shapes["embed_norm.weight"] = (hidden,)
        return shapes

    def optional(self) -> frozenset[str]:
        return super().optional() | {"input_proj.bias"}

    @property
    def guesses(self) -> str:
        return f"a token after the other, {self._by_layers()}"

    def _by_layers(self) -> str:
        return f"by {self.decoder.layers} layer{'s' if self.decoder.layers > 1 else ''}"

    def executor(self, files: HeadFiles, setup: HeadSetup) -> HeadExecutor:
        return RecurrentExecutor(files, setup)


@dataclass(frozen=True)
class RecurrentStep:
    states: Tensor  # [rows, hidden], for the rows below
    outputs: Tensor  # [kept rows, hidden], after the last norm: what `lm_head` gets


class RecurrentModule(torch.nn.Module):
    def __init__(self, head: RecurrentHead, parts: Parts, words: Tensor | slice) -> None:
        super().__init__()
        decoder = head.decoder
        self.zero_first, self.recycles_normed = head.zero_first_embedding, head.recycles_normed
        self.embedding = parts.tensor("embed_tokens.weight")
        self.angles = Angles(decoder, parts.dtype, parts.device)
        self.entry = WideEntry(head, parts) if head.entry == "wide" else JoinedEntry(head, parts)
        self.layers = torch.nn.ModuleList(HeadLayer(parts, decoder, i) for i in range(decoder.layers))
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
        """Writes KV. `angles` must reach all positions."""
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
    def __init__(self, head: RecurrentHead, parts: Parts) -> None:
        super().__init__()
        self.residual_normed = head.residual_normed
        self.embed_norm = parts.norm("layers.0.input_layernorm", head.decoder)
        self.state_norm = parts.norm("hidden_norm", head.decoder)

    def forward(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        state = normed(self.state_norm, states)
        entering = torch.cat((normed(self.embed_norm, embedded), state), dim=-1)
        return (state if self.residual_normed else states), entering


class JoinedEntry(torch.nn.Module):
    def __init__(self, head: RecurrentHead, parts: Parts) -> None:
        super().__init__()
        self.hidden_first = head.hidden_first
        self.embed_norm = parts.norm("embed_norm", head.decoder)
        self.state_norm = parts.norm("hidden_norm", head.decoder)
        self.product = parts.product(parts.affine("input_proj"))

    def forward(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, None]:
        both = normed(self.embed_norm, embedded), normed(self.state_norm, states)
        return self.product(torch.cat(both[::-1] if self.hidden_first else both, dim=-1)), None


class RecurrentRows:
    def __init__(self, files: HeadFiles, setup: HeadSetup) -> None:
        head = cast(RecurrentHead, files.spec.head)
        parts = Parts(files.tensors, setup.kernels(head.decoder.head_dim), setup.dtype)
        self.vocab = DraftVocab.of(files.spec.draft_vocab, files.d2t, len(parts.tensors["embed_tokens.weight"]), setup)
        self.kernels, self.buckets = parts.kernels, parts.kernels.buckets()
        self.module = RecurrentModule(head, parts, self.vocab.words).eval()
        self.kv = empty_kv(kv_shape(head.decoder), setup.dtype, setup.num_slots, setup.device)
        self.has_angles = False  # of all positions
        self._device = setup.device

    def __call__(self, batch: Batch, states: Tensor) -> RecurrentStep:
        """`states` [rows, hidden], of the token before each, is written to. Kept rows are padded as the batch's are."""
        if not self.has_angles:
            self.module.angles.reach(int(batch.metadata.row_positions.max()) + 1)
        batch = batch.map(lambda tensor: tensor.to(self._device))
        step: RecurrentStep = self.module(batch.input_ids, states, batch.keep, batch.metadata, self.kv)
        return step


class RecurrentExecutor(HeadExecutor):
    def __init__(self, files: HeadFiles, setup: HeadSetup) -> None:
        decoder = cast(RecurrentHead, files.spec.head).decoder
        self.rows = RecurrentRows(files, setup)
        super().__init__(files.spec.projection.width, setup, decoder.context, self.rows.vocab, self.rows.buckets)
        self.kv = self.rows.kv
        self.states = zeros((setup.num_slots + 1, decoder.hidden), setup.dtype, setup.device)
        self._level: Forward = self._computed
        self._draw = partial(self.rows.kernels.draw, ids=self.vocab.ids)
        if self.rows.kernels.records:
            self.rows.module.angles.reach(min(decoder.context, setup.num_slots))  # a graph reads them where they are
            self.rows.has_angles, self._level = True, self.rows.kernels.recorded(self._computed, self._draw)

    def run(self, rows: Sequence[SequenceRows], sampling: Sampling) -> HeadLogits:
        batches = Batch.build(rows, self.buckets, self.num_slots)
        padded = sum(len(batch.input_ids) for batch in batches)
        entering, logits, first = StatesBefore.of(rows, padded, self.feature_width, self.num_slots), [], 0
        if self.rows.has_angles and len(batches) == 1:
            batches = [replace(batches[0], draws=self.draws(sampling, len(batches[0].keep)))]
        for batch in batches:
            forwarded = self._level(entering.given_to(batch, first))
            logits.append(forwarded.logits[: batch.num_kept].float())
            first += len(batch.input_ids)
        return HeadLogits(logits[0] if len(logits) == 1 else torch.cat(logits), forwarded=forwarded)

    def _computed(self, batch: Batch) -> Forwarded:
        batch = batch.map(lambda tensor: tensor.to(self._device))
        states = self.states.index_select(0, cast(Tensor, batch.before))
        if batch.features is not None:
            states = torch.where(
                batch.features[:, :1].isnan(), states, self.feature_values(batch.features).to(states.dtype)
            )
        step = self.rows(batch, states)
        self.states.index_copy_(0, batch.metadata.row_slots.long(), step.states)
        logits = self.rows.module.lm_head(step.outputs)
        if batch.draws is None or batch.draws.masked:
            return Forwarded(logits)
        return Forwarded(logits, self._draw(logits, batch.draws))


@dataclass(frozen=True)
class StatesBefore:
    """The state of the token before, for each row: kept in its slot, or a feature."""

    slots: NDArray[np.int32]  # [rows], any where a feature takes its place, and of padding
    features: Features | None  # [rows, width], NaN where a slot has the state; None: no row has one

    @classmethod
    def of(cls, sequences: Sequence[SequenceRows], padded: int, width: int, scratch: int) -> "StatesBefore":
        """`sequences` are `without_first`. The state of the token before replaces features that are unknown at the
        beginning."""
        slots, row = np.full(padded, scratch, np.int32), 0
        features = np.full((padded, width), np.nan, np.float32) if any(len(s.tokens) for s in sequences) else None
        for s in sequences:
            count, end = len(s.tokens), row + s.num_rows
            if features is not None and count:
                told, unknown = filled(s, width)
                kept = unknown if s.start else 0  # nothing before: zeros
                slots[row : row + kept] = s.prefix_slots[s.start - 1]
                features[row + kept : row + count] = told[kept:]
            if len(s.nodes):
                slots[row + count : end] = _parents(s)
            row = end
        return cls(slots, features)

    def given_to(self, batch: Batch, first: int) -> Batch:
        """`batch` has the rows from `first` on."""
        rows = slice(first, first + len(batch.input_ids))
        features = None if self.features is None else torch.from_numpy(self.features[rows])
        return replace(batch, before=torch.from_numpy(self.slots[rows]), features=features)


def _parents(rows: SequenceRows) -> NDArray[np.int32]:
    """Slots of the nodes' parents, [nodes]."""
    nodes = rows.nodes
    above = nodes.paths[np.arange(len(nodes)), np.maximum(nodes.depths - 2, 0)]
    return np.where(nodes.depths > 1, above, rows.prefix_slots[-1])
