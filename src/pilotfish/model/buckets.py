"""Sizes that forwards are padded to: a row's bits may depend on them, and a CUDA graph is recorded for each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

POWERS = tuple(1 << exponent for exponent in range(21))


@dataclass(frozen=True)
class Buckets:
    """Sizes of a forward's dimensions, ascending; a dimension without any takes every size."""

    rows: tuple[int, ...] = ()
    sequences: tuple[int, ...] = ()
    prefix: tuple[int, ...] = ()  # positions
    path: tuple[int, ...] = ()  # nodes

    def pad_rows(self, rows: int) -> int:
        """Rows after padding: whole forwards of the largest bucket, and the smallest bucket that holds the rest."""
        if not self.rows:
            return rows
        rest = rows % self.rows[-1]
        return rows - rest + (bucket(rest, self.rows) if rest else 0)


def bucket(size: int, sizes: tuple[int, ...]) -> int:
    """The smallest of `sizes` that holds `size`; `size` itself if none does."""
    return next((each for each in sizes if each >= size), size)


#: For the C++ kernels: a row's bits do not depend on the other rows.
EXACT = Buckets()
#: Library matrix products on a CPU give a row the same bits at every row count from 16 up, others below.
LIBRARY = Buckets(rows=(16, 32, 64, 128, 256, 512, 1024))
_WIDTHS = {"sequences": POWERS[::3], "prefix": POWERS[10:], "path": POWERS[3::3]}
#: cuBLAS chooses a kernel by the row count, and kernels differ in the order of their sums. So in float32 there is one
#: row count, and more rows run as several forwards; in bfloat16, where equal bits are not promised, there are a few.
CUDA = {
    torch.float32: Buckets(rows=(64,), **_WIDTHS),
    torch.bfloat16: Buckets(rows=(16, 32, 64, 128, 256), **_WIDTHS),
}


def library_buckets(device: torch.device, dtype: torch.dtype) -> Buckets:
    """For forwards whose matrix products are a library's."""
    return CUDA[dtype] if device.type == "cuda" else LIBRARY
