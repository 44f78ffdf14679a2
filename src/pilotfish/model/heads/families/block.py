"""DFlash and DSpark: features are context; one forward over [anchor, mask, …] gives every slot of a block, and nodes
below the root are products with the output layer alone.

    position   0 ......... p - 1    p        p + 1 ... p + block - 1
    embedding                       anchor   mask ....
    K and V    of features          of the block itself; nobody sees them later

K and V of a position lie in the slot of the token after it, whose row brought the feature. Slots of a block see each
other, whatever comes first, unless the head is causal.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from pilotfish.core.cache.slots import NO_SLOTS, Slots
from pilotfish.core.scheduling.executor import Sampling, SequenceRows
from pilotfish.model.attention import NO_ROWS, AttentionMetadata
from pilotfish.model.batch import EXACT, POWERS, Batch, Forwarded, bucket
from pilotfish.model.heads.executor import DraftVocab, HeadExecutor, HeadLogits, HeadSetup, filled
from pilotfish.model.heads.parts import Angles, HeadLayer, Parts, RotatedRows, kv_shape, normed
from pilotfish.model.heads.roots import ROOTS, KeptRow, RootSlots, kept_rows
from pilotfish.model.heads.spec import DecoderHead, HeadFiles, HeadMemory, HeadSpec, Shapes
from pilotfish.model.kernels import Forward
from pilotfish.model.kv_planes import empty_kv, zeros

#: Blocks that one forward takes, and nodes that a recorded level takes.
BLOCKS, MOST_NODES = 32, 1024
#: The C++ kernel lays keys out once for many rows where so many positions are in all their prefixes.
SHARED = 64


@dataclass(frozen=True)
class BlockHead(DecoderHead):
    """Markov: logits of slot k += W2 W1[token of slot k - 1], W1 and W2 [vocab, rank], maybe gated by the slot's state.
    Confidence: the log-chance that a guess is accepted, from the slot's state, or that and W1[token]."""

    block: int  # rows of its forward, the anchor included
    mask_token: int
    anchored: bool  # slot k gives the token after position k (DSpark), not the token at it, slot 0 none (DFlash)
    causal: bool = False
    markov_rank: int = 0  # 0: none
    markov: Literal["plain", "gated"] = "plain"
    confidence: Literal["", "hidden", "markov"] = ""  # what it looks at; "": there is none

    @property
    def first(self) -> int:
        return 0 if self.anchored else 1

    def shapes(self, spec: HeadSpec, vocab: int) -> Shapes:
        hidden, rank = self.decoder.hidden, self.markov_rank
        shapes = super().shapes(spec, vocab) | self.decoder.shapes()
        if rank:
            shapes |= {"markov.w1.weight": (vocab, rank), "markov.w2.weight": (spec.draft_vocab, rank)}
        if rank and self.markov == "gated":
            shapes |= {"markov.gate.weight": (rank, hidden + rank), "markov.gate.bias": (rank,)}
        if self.confidence:
            seen = hidden + (rank if self.confidence == "markov" else 0)
            shapes |= {"confidence.weight": (1, seen), "confidence.bias": (1,)}
        return shapes

    @property
    def guesses(self) -> str:
        markov = ", each after the one before" if self.markov_rank else ""
        return f"{self.block - self.first} tokens at once{markov}, by {self.decoder.layers} layers"

    def memory(self) -> HeadMemory:
        decoder = self.decoder
        product = decoder.kv_size * decoder.hidden  # one for keys and values of all layers
        roots = self.block * (BLOCKS * decoder.kv_size + ROOTS * decoder.hidden)
        return super().memory()._replace(roots=product + roots)

    def executor(self, files: HeadFiles, setup: HeadSetup) -> HeadExecutor:
        return BlockExecutor(files, setup)


class BlockDecoder(torch.nn.Module):
    """`kv` has slots of tokens, then those of the blocks of a forward. A forward is recorded where kernels do that."""

    def __init__(self, head: BlockHead, parts: Parts, num_slots: int) -> None:
        super().__init__()
        self.head, self.kernels, self.device = head, parts.kernels, parts.device
        decoder, bare = head.decoder, replace(head.decoder, window=head.decoder.window if head.causal else 0)
        self.kv = empty_kv(kv_shape(decoder), parts.dtype, num_slots + BLOCKS * head.block, parts.device)
        self.first_own = num_slots
        self.embedding = parts.tensor("embed_tokens.weight")
        self.angles = Angles(decoder, parts.dtype, parts.device)
        self.layers = [HeadLayer(parts, bare, i) for i in range(decoder.layers)]
        products = [f"layers.{i}.self_attn.{name}_proj" for i in range(decoder.layers) for name in "kv"]
        self.context = parts.product(*map(parts.affine, products))
        self.norm = parts.norm("norm", decoder)
        self._states: Forward = self._computed
        if parts.kernels.records:
            self.angles.reach(min(decoder.context, num_slots) + head.block)
            self._states = parts.kernels.recorded(self._computed, parts.kernels.draw)

    def add_context(self, features: Tensor, positions: Tensor, slots: Tensor, reach: int) -> None:
        """features [rows, hidden] of `positions` int64 [rows], below `reach`; K and V go to `slots` int64 [rows]."""
        decoder = self.head.decoder
        rows = self.context(features.to(self.embedding.dtype)).view(
            len(features), decoder.layers, 2, decoder.kv_heads, decoder.head_dim
        )
        self.angles.reach(reach)
        cos, sin = self.angles(positions)
        for i, (layer, kv) in enumerate(zip(self.layers, self.kv, strict=True)):
            keys = normed(layer.attention.k_norm, rows[:, i, 0])
            kv.write(slots, self.kernels.rotate(keys, cos, sin), rows[:, i, 1])

    def forward(self, anchors: Sequence[int], contexts: Sequence[Slots]) -> Tensor:
        """States of the slots of blocks, after the last norm: [blocks, block, hidden]. Each begins with its anchor."""
        parts = [slice(first, first + BLOCKS) for first in range(0, len(anchors), BLOCKS)]
        return torch.cat([self._forward(anchors[part], contexts[part]) for part in parts])

    def _forward(self, anchors: Sequence[int], contexts: Sequence[Slots]) -> Tensor:
        records, count = self.kernels.records, len(anchors)
        padded = bucket(count, POWERS) if records else count
        contexts = [*contexts, *[NO_SLOTS] * (padded - count)]
        ids = np.full((padded, self.head.block), self.head.mask_token)
        ids[:count, 0] = anchors
        lengths = np.array([len(context) for context in contexts], np.int32)
        positions = lengths[:, None] + np.arange(self.head.block, dtype=np.int32)
        if not records:
            self.angles.reach(int(positions.max()) + 1)
        of_rows, before = (torch.from_numpy(x.flatten()) for x in (ids, positions))
        batch = Batch(of_rows, torch.zeros(1, dtype=torch.int64), 0, self.metadata(contexts), before=before)
        return self._states(batch).logits.view(padded, self.head.block, -1)[:count]

    def _computed(self, batch: Batch) -> Forwarded:
        """States of all rows. `before` has their positions in the sequence."""
        batch = batch.map(lambda tensor: tensor.to(self.device))
        rows = RotatedRows(*self.angles(cast(Tensor, batch.before)), batch.metadata)
        x = self.embedding.index_select(0, batch.input_ids)
        for layer, kv in zip(self.layers, self.kv, strict=True):
            x = layer(x, None, rows, kv)
        return Forwarded(normed(self.norm, x))

    def metadata(self, contexts: Sequence[Slots]) -> AttentionMetadata:
        """A row sees its prefix up to its position. The prefix ends with the block; all of the block's rows stand at
        its last position, unless the head is causal."""
        block, count = self.head.block, len(contexts)
        own = np.arange(self.first_own, self.first_own + count * block, dtype=np.int32).reshape(count, block)
        lengths = np.array([len(context) for context in contexts], np.int32)
        whole = -(-(lengths.max() + block) // SHARED) * SHARED
        prefix_slots = np.zeros((count, bucket(int(whole), self.kernels.buckets().prefix)), np.int32)
        for i, context in enumerate(contexts):
            prefix_slots[i, : len(context) + block] = np.concatenate((context, own[i]))
        last = np.tile(np.arange(block, dtype=np.int32), count) if self.head.causal else np.int32(block - 1)
        positions, paths = np.repeat(lengths, block) + last, np.zeros((own.size, 1), np.int32)
        width = prefix_slots.shape[1]
        prefixes = np.full(own.size, width, np.int32)
        window = self.head.decoder.window
        if window and not self.head.causal and lengths.max() + block > window:
            prefixes = np.zeros_like(prefixes)
            positions, paths = self._near(contexts, own)
        starts = np.repeat(np.arange(count, dtype=np.int32) * np.int32(width), block)
        rows = (own.flatten(), starts, positions, prefixes, paths, prefix_slots.flatten())
        return AttentionMetadata(*map(torch.from_numpy, rows), longest=width)

    def _near(self, contexts: Sequence[Slots], own: NDArray[np.int32]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """The last position [rows], and as the path [rows, longest] all that rows with a window to both sides see. own
        [blocks, block]."""
        window, block = self.head.decoder.window, self.head.block
        positions, paths = np.zeros(own.size, np.int32), np.zeros((own.size, window + block), np.int32)
        for row in range(own.size):
            sequence, place = divmod(row, block)
            before = contexts[sequence][max(len(contexts[sequence]) + place - window + 1, 0) :]
            seen = np.concatenate((before, own[sequence, max(place - window + 1, 0) : place + window]))
            positions[row], paths[row, : len(seen)] = len(seen) - 1, seen
        return positions, paths


class SlotHead(torch.nn.Module):
    def __init__(self, head: BlockHead, parts: Parts, words: Tensor | slice) -> None:
        super().__init__()
        self.lm_head = parts.product(parts.affine("lm_head", words))
        self.markov = MarkovCorrection(head, parts, words) if head.markov_rank else None
        self.confidence = parts.product(parts.affine("confidence")) if head.confidence else None
        self.confides_in_markov = head.confidence == "markov"

    def forward(self, states: Tensor, which: Tensor, tokens: Tensor) -> HeadLogits:
        """states [slots, hidden]; `which` and `tokens` int64 [nodes]: a node's place in `states`, and its token."""
        logits, seen = self.lm_head(states).index_select(0, which).float(), states.index_select(0, which)
        if self.markov is not None:
            before = self.markov.before.index_select(0, tokens)
            logits += self.markov(seen, before)
            seen = torch.cat((seen, before), dim=-1) if self.confides_in_markov else seen
        if self.confidence is None:
            return HeadLogits(logits)
        return HeadLogits(logits, F.logsigmoid(self.confidence(seen)[:, 0].double()))


class MarkovCorrection(torch.nn.Module):
    def __init__(self, head: BlockHead, parts: Parts, words: Tensor | slice) -> None:
        super().__init__()
        self.before = parts.tensor("markov.w1.weight")  # [vocab, rank]
        self.correction = parts.product(parts.affine("markov.w2", words))
        self.gate = parts.product(parts.affine("markov.gate")) if head.markov == "gated" else None

    def forward(self, states: Tensor, before: Tensor) -> Tensor:
        if self.gate is not None:
            gates = self.gate(torch.cat((states, before), dim=-1))
            before = before * gates.double().sigmoid().to(before.dtype)  # as in `HeadAttention`
        return cast(Tensor, self.correction(before))


class BlockExecutor(HeadExecutor):
    """A committed token's row writes K and V of the position before. A root's block is computed when first needed."""

    def __init__(self, files: HeadFiles, setup: HeadSetup) -> None:
        head = cast(BlockHead, files.spec.head)
        parts = Parts(files.tensors, setup.kernels(head.decoder.head_dim), setup.dtype)
        vocab = DraftVocab.of(files.spec.draft_vocab, files.d2t, len(parts.tensors["embed_tokens.weight"]), setup)
        super().__init__(head.projection.width, setup, head.context, vocab, EXACT)
        self.decoder = BlockDecoder(head, parts, setup.num_slots)
        self.deepest = head.block - head.first
        self._slots = RootSlots(self._compute, self._logits, self.padded, head.block, head.first)
        self._head, self._kernels = SlotHead(head, parts, vocab.words), parts.kernels
        self._level: Forward | None = None
        self._draw = partial(parts.kernels.draw, ids=vocab.ids)
        if parts.kernels.records:
            self._entering = zeros((MOST_NODES, head.decoder.hidden), setup.dtype, setup.device)
            self._level = parts.kernels.recorded(self._below, self._draw)
        self._tokens = np.zeros(setup.num_slots, np.int64)  # by slot, the committed one there

    def run(self, rows: Sequence[SequenceRows], sampling: Sampling) -> HeadLogits:
        committed = [s for s in rows if len(s.tokens)]
        if committed:
            self._add_context(committed)
        kept = [row for s in rows for row in kept_rows(s)]
        return self._slots.below(kept, sampling) if kept else HeadLogits(torch.zeros(0, self.vocab.size))

    def _logits(self, states: Tensor, which: Tensor, tokens: Tensor, sampling: Sampling) -> HeadLogits:
        count = len(which)
        padded = bucket(count, self._kernels.buckets().rows)
        draws = None if self._level is None or padded > len(self._entering) else self.draws(sampling, padded)
        if self._level is None or draws is None or not draws.plain:
            return cast(HeadLogits, self._head(states, which.to(self._device), tokens.to(self._device)))
        self._entering[: len(states)] = states
        places, ids = (F.pad(x, (0, padded - count)) for x in (which, tokens))
        forwarded = self._level(Batch(ids, places, count, NO_ROWS, draws=draws))
        return HeadLogits(forwarded.logits[:count], forwarded=forwarded)

    def _below(self, batch: Batch) -> Forwarded:
        """`input_ids` are the nodes' tokens, `keep` the places of their states in `_entering`."""
        logits: HeadLogits = self._head(self._entering[: len(batch.keep)], batch.keep, batch.input_ids)
        assert batch.draws is not None
        drawn, confidences = self._draw(logits.values, batch.draws), logits.confidences
        if confidences is not None:
            k = batch.draws.children
            drawn[:, k : 2 * k].view(torch.float64).add_(confidences[:, None])
        return Forwarded(logits.values, drawn)

    def _add_context(self, rows: Sequence[SequenceRows]) -> None:
        slots = np.concatenate([s.prefix_slots[s.start :] for s in rows]).astype(np.int64)
        positions = np.concatenate([np.arange(s.start, len(s.prefix_slots)) for s in rows])
        features = np.concatenate([filled(s, self.feature_width)[0] for s in rows])
        self._tokens[slots] = np.concatenate([s.tokens for s in rows])
        self._slots.forget(slots.tolist())
        places, into = (torch.from_numpy(x).to(self._device) for x in (positions, slots))
        self.decoder.add_context(
            self.feature_values(torch.from_numpy(features)), places, into, int(positions.max()) + 1
        )

    def _compute(self, roots: Sequence[KeptRow]) -> Tensor:
        return cast(Tensor, self.decoder(self._tokens[[row.root for row in roots]], [row.prefix for row in roots]))
