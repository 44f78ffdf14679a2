"""Inputs of attention kernels, shared by the tests of C++ and of Triton."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from pilotfish.model.attention import AttentionMetadata
from pilotfish.model.kv_planes import LARGEST, LayerKV


class TreeRows:
    """The last `chunk` rows of each prefix, and nodes of a random tree below it. The second prefix begins with slots of
    the first. Slots that no row may read hold NaN; of KV `stored` in 8 bits, they have it as their scales."""

    def __init__(
        self,
        prefixes: list[int],
        nodes: int,
        dtype: torch.dtype = torch.float32,
        heads: tuple[int, int, int] = (4, 2, 32),  # heads, KV heads, head size
        *,
        chunk: int = 1,
        seed: int = 0,
        device: torch.device | str = "cpu",
        stored: torch.dtype | None = None,  # as keys and values are
    ) -> None:
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        num_slots = 2 * (sum(prefixes) + nodes * len(prefixes))
        free = iter(rng.permutation(num_slots).tolist())
        self.device = torch.device(device)
        self.prefixes = [[next(free) for _ in range(size)] for size in prefixes]
        if len(prefixes) > 1:
            shared = min(prefixes[:2]) // 2
            self.prefixes[1][:shared] = self.prefixes[0][:shared]
        self.rows: list[tuple[int, int, int, list[int]]] = []  # slot, sequence, position, path
        for i, prefix in enumerate(self.prefixes):
            self.rows += [(prefix[p], i, p, []) for p in range(max(0, len(prefix) - chunk), len(prefix))]
            paths: list[list[int]] = [[]]
            for _ in range(nodes):
                paths.append([*paths[rng.integers(len(paths))], next(free)])
                self.rows.append((paths[-1][-1], i, len(prefix) + len(paths[-1]) - 1, paths[-1]))
        num_heads, kv_heads, head_dim = heads
        self.q, self.k, self.v = (
            torch.randn(len(self.rows), n, head_dim).to(dtype) for n in (num_heads, kv_heads, kv_heads)
        )
        self.sinks = torch.randn(num_heads).to(dtype)
        self.kv = unread_kv(num_slots + 1, kv_heads, head_dim, stored or dtype)
        known = torch.tensor([slot for prefix in self.prefixes for slot in prefix])
        self.kv.write(known, *(torch.randn(len(known), kv_heads, head_dim).to(dtype) for _ in range(2)))
        self.everything = list(range(len(self.rows)))

    def path_of(self, row: int) -> list[int]:
        """Slots of all positions that the row sees without a window."""
        _, sequence, position, path = self.rows[row]
        return (self.prefixes[sequence] + path)[: position + 1]

    def lose_unseen(self, window: int) -> None:
        """Slots that no row sees hold NaN, and other slots than they did stand for them."""
        seen = {slot for row in self.everything for slot in self.path_of(row)[-window:]}
        unseen = [slot for slot in range(len(self.kv.keys)) if slot not in seen]
        for plane in self.kv:
            if plane.dtype not in LARGEST:  # their scales say it
                plane[unseen] = torch.nan
        self.prefixes = [[slot if slot in seen else unseen[0] for slot in prefix] for prefix in self.prefixes]

    def inputs(self, chosen: list[int], extra_width: int = 0) -> list[Any]:
        """Arguments of a `TreeAttention` for some rows, without the scoring; all calls share the KV."""
        rows = [self.rows[i] for i in chosen]
        prefix_slots = torch.tensor([slot for prefix in self.prefixes for slot in prefix], dtype=torch.int32)
        starts = [sum(map(len, self.prefixes[:i])) for i in range(len(self.prefixes))]
        paths = torch.zeros(len(rows), max(len(r[3]) for r in rows) + 1 + extra_width, dtype=torch.int32)
        for i, row in enumerate(rows):
            paths[i, : len(row[3])] = torch.tensor(row[3], dtype=torch.int32)
        columns = [[r[0] for r in rows], [starts[r[1]] for r in rows], [r[2] for r in rows]]
        indices = [torch.tensor(c, dtype=torch.int32) for c in (*columns, [len(self.prefixes[r[1]]) for r in rows])]
        self.kv = LayerKV(*(plane.to(self.device) for plane in self.kv))
        longest = max(map(len, self.prefixes)) + extra_width
        metadata = AttentionMetadata(*(x.to(self.device) for x in (*indices, paths, prefix_slots)), longest=longest)
        return [*(x[chosen].to(self.device) for x in (self.q, self.k, self.v)), self.kv, metadata]

    def padded_inputs(self, padding: int = 2) -> list[Any]:
        """Arguments for all rows, with padding rows after them."""
        *qkv, kv, metadata = self.inputs(self.everything)
        rows = {name: F.pad(x, (0, padding)) for name, x in vars(metadata).items() if name.startswith("row_")}
        rows["path_slots"] = F.pad(metadata.path_slots, (0, 0, 0, padding))
        rows["row_slots"][-padding:] = len(kv.keys) - 1  # the scratch slot
        rows["row_positions"][-padding:] = -1
        return [*(F.pad(x, (0, 0, 0, 0, 0, padding)) for x in qkv), kv, replace(metadata, **rows)]


def unread_kv(slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> LayerKV:
    """Whoever reads a slot before it is written gets NaN."""
    shape = slots, kv_heads, head_dim
    if dtype not in LARGEST:
        return LayerKV(*(torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)))
    scales = [torch.full(shape[:2], torch.nan) for _ in range(2)]
    return LayerKV(*(torch.ones(shape).to(dtype) for _ in range(2)), *scales)


def shifted(rows: TreeRows) -> TreeRows:
    """The same rows, with everything one slot further."""
    rows.prefixes = [[slot + 1 for slot in prefix] for prefix in rows.prefixes]
    rows.rows = [(slot + 1, i, position, [s + 1 for s in path]) for slot, i, position, path in rows.rows]
    rows.kv = LayerKV(*(torch.cat([plane[-1:], plane[:-1]]) for plane in rows.kv))
    return rows
