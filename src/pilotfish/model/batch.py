from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.core.cache.slots import Slots
from pilotfish.core.scheduling.executor import Sampling, SequenceRows
from pilotfish.model.attention import AttentionMetadata
from pilotfish.model.draws import Draws
from pilotfish.model.rules import allowed_bits
from pilotfish.model.tables import Tables


@dataclass(frozen=True)
class Batch(Tables):
    """Its last tensor is the one without a padded size: `metadata.prefix_slots`."""

    draws: Draws | None = field(default=None, kw_only=True)  # None: nothing is drawn, or later
    before: Tensor | None = field(default=None, kw_only=True)  # int32 [rows], of heads: slots of states to go on from
    features: Tensor | None = field(default=None, kw_only=True)  # float32 [rows, width], of heads: NaN for a state
    input_ids: Tensor  # int64 [rows]
    keep: Tensor  # int64 [kept rows], padded like rows
    num_kept: int
    metadata: AttentionMetadata
    last: bool = True  # of those that hold the rows of one forward
    follows: Tensor | None = None  # as `Forwarded.drawn` of the forward before: `input_ids` -1 - i is its token i

    @classmethod
    def build(cls, sequences: Sequence[SequenceRows], buckets: "Buckets", scratch: int) -> "list[Batch]":
        """One batch, or several in order: a row's ancestors come before it, so their KV is there when it runs."""
        padded = buckets.pad_rows(sum(s.num_rows for s in sequences))
        ids, slots = np.zeros(padded, np.int64), np.full(padded, scratch, np.int32)
        positions, prefixes = np.full(padded, -1, np.int32), np.zeros(padded, np.int32)
        starts, shared = np.zeros(padded, np.int32), shared_prefixes(sequences, buckets.shared)
        once = {one.start: s.prefix_slots[: one.tokens] for one, s in zip(shared, sequences, strict=True)}
        prefix_slots = np.concatenate([*once.values()], dtype=np.int32)
        longest = bucket(max(one.tokens for one in shared), buckets.prefix)
        deepest = max(one.path for one in shared)
        path_slots = np.zeros((padded, bucket(max(deepest, 1), buckets.path)), np.int32)
        keep: list[int] = []
        row = 0
        for s, one in zip(sequences, shared, strict=True):
            prefix, nodes, own = len(s.prefix_slots), s.nodes, s.prefix_slots[one.tokens :]
            chunk, end = slice(row, row + len(s.tokens)), row + s.num_rows
            ids[chunk], slots[chunk] = s.tokens, s.prefix_slots[s.start :]
            positions[chunk] = np.arange(s.start, prefix)
            starts[row:end], prefixes[row:end] = one.start, one.tokens
            if len(own):
                path_slots[row:end, : len(own)] = own
            keep.extend(row + offset for offset in s.kept)
            if nodes.deepest:
                tree = slice(chunk.stop, end)
                ids[tree], slots[tree] = nodes.tokens, nodes.slots
                positions[tree] = prefix - 1 + nodes.depths
                path_slots[tree, len(own) : one.path] = nodes.paths
                keep.extend(range(chunk.stop, end))
            row = end
        rows = (ids, slots, starts, positions, prefixes, path_slots)
        size = buckets.rows[-1] if buckets.rows else padded
        cuts = range(0, padded, size)
        return [cls._cut(rows, prefix_slots, longest, keep, slice(cut, cut + size), buckets) for cut in cuts]

    @classmethod
    def _cut(
        cls,
        rows: Sequence[NDArray[np.generic]],
        prefix_slots: NDArray[np.int32],
        longest: int,
        keep: list[int],
        cut: slice,
        buckets: "Buckets",
    ) -> "Batch":
        kept = [row - cut.start for row in keep if cut.start <= row < cut.stop]
        padding = [0] * (bucket(len(kept), buckets.rows) - len(kept))
        ids, *indices = (torch.from_numpy(x[cut]) for x in rows)
        metadata = AttentionMetadata(*[*indices, torch.from_numpy(prefix_slots)], longest=longest)
        whole = torch.tensor(kept + padding, dtype=torch.int64)
        return cls(ids, whole, len(kept), metadata, last=cut.stop >= len(rows[0]))

    def take_tokens(self, drawn: Tensor) -> None:
        """Those of the forward before, in place; any after a row that is not finite."""
        ids, tokens = self.input_ids, drawn[:, 0].clamp(min=0)
        ids.copy_(torch.where(ids < 0, tokens.index_select(0, (-1 - ids).clamp(min=0)), ids))


@dataclass(frozen=True)
class Forwarded:
    logits: Tensor  # [kept rows, vocab]
    drawn: Tensor | None = None  # of the batch's draws, as `Kernels.draw` gives it
    later: Callable[[Tensor], Tensor] | None = None  # gives `drawn`, for the bits of draws that are masked
    began: Any = None  # the moment when all that it reads was on its way to the device, where it is recorded

    def told(self, sampling: Sampling, vocab: int) -> Tensor | None:
        """What was drawn, on the host. Waits for the masks of `sampling`, of a forward that draws from `vocab`
        columns."""
        if self.later is not None:
            return self.later(allowed_bits(sampling.masks, sampling.edits, len(sampling), vocab)).cpu()
        return None if self.drawn is None else self.drawn.cpu()

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.logits,) if self.drawn is None else (self.logits, self.drawn)


POWERS = tuple(1 << exponent for exponent in range(21))


@dataclass(frozen=True)
class Buckets:
    """Sizes that a forward's dimensions are padded to, ascending; a dimension without any takes every size."""

    rows: tuple[int, ...] = ()
    prefix: tuple[int, ...] = ()  # positions of the longest
    path: tuple[int, ...] = ()  # nodes
    shared: int = 0  # tokens from which on a prefix of sequences beside each other is kept once; 0: never

    def pad_rows(self, rows: int) -> int:
        """Whole forwards of the largest bucket, and the smallest bucket that holds the rest."""
        if not self.rows:
            return rows
        rest = rows % self.rows[-1]
        return rows - rest + (bucket(rest, self.rows) if rest else 0)


#: Tokens, at most, that a row has after a prefix that it shares.
LONGEST_PATH = 512


class SharedPrefix(Struct, frozen=True):
    start: int  # in the batch's `prefix_slots`
    tokens: int
    path: int  # most tokens of a row after them


def shared_prefixes(sequences: Sequence[SequenceRows], least: int) -> list[SharedPrefix]:
    """Of each sequence. Those beside each other that begin with the same slots, `least` or more, as the samples of a
    prompt do, have these in common: their rows read them once. Otherwise a prefix is all that a sequence has computed.

    prefix_slots   prompt ......... | another sequence ...
    path_slots     rest of sample 1, nodes
                   rest of sample 2, nodes
    """
    found, start, place = list[SharedPrefix](), 0, 0
    while place < len(sequences):
        first, end = sequences[place], place + 1
        tokens = len(first.prefix_slots)
        while least and end < len(sequences):
            common = _common(first.prefix_slots, sequences[end].prefix_slots, least if end == place + 1 else tokens)
            shared = common if end == place + 1 else min(common, tokens)
            if not shared or max(first.most, sequences[end].most) > shared + LONGEST_PATH:
                break
            end, tokens = end + 1, shared
        found += [SharedPrefix(start, tokens, s.most - tokens) for s in sequences[place:end]]
        start, place = start + tokens, end
    return found


def _common(one: Slots, other: Slots, least: int) -> int:
    """First slots that are the same; 0 if fewer than `least`."""
    count = min(len(one), len(other))
    if count < least or one[least - 1] != other[least - 1]:
        return 0
    different = one[:count] != other[:count]
    common = int(different.argmax()) if different.any() else count
    return common if common >= least else 0


def bucket(size: int, sizes: tuple[int, ...]) -> int:
    return next((each for each in sizes if each >= size), size)


#: For the C++ kernels: a row's bits do not depend on the other rows.
EXACT = Buckets()
#: Library matrix products on a CPU give a row the same bits at these row counts, others at some between and below.
LIBRARY = Buckets(rows=(16, 32, 64, 128, 256, 512, 1024))
_WIDTHS: dict[str, Any] = {"prefix": POWERS[10:], "path": POWERS[3::3]}
#: For the Triton kernels, whose bits do not depend on it: few sizes, so that few graphs are recorded.
GRAPHS = Buckets(rows=(16, 64, 128, 256, 512, 1024), shared=1024, **_WIDTHS)
#: cuBLAS chooses a kernel by the row count, and kernels differ in the order of their sums. So there is one row count,
#: and more rows run as several forwards.
CUBLAS = Buckets(rows=(64,), **_WIDTHS)


def library_buckets(device: torch.device) -> Buckets:
    return CUBLAS if device.type == "cuda" else LIBRARY
