"""The executor of a head, by its family."""

from __future__ import annotations

import torch

from pilotfish.heads.block_executor import BlockExecutor
from pilotfish.heads.head_executor import HeadExecutor
from pilotfish.heads.masked_executor import MaskedExecutor
from pilotfish.heads.parallel_executor import ParallelExecutor
from pilotfish.heads.recurrent_executor import RecurrentExecutor
from pilotfish.heads.spec import BlockHead, HeadFiles, MaskedHead, ParallelHead, RecurrentHead


def make_head_executor(
    files: HeadFiles,
    device: torch.device,
    dtype: torch.dtype,
    num_slots: int,
    *,
    eager: bool,
    vocab_size: int | None = None,
) -> HeadExecutor:
    """Tokens from `vocab_size` on are never given."""
    match files.spec.head:
        case MaskedHead():
            return MaskedExecutor(files, device, dtype, num_slots, eager=eager, vocab_size=vocab_size)
        case RecurrentHead():
            return RecurrentExecutor(files, device, dtype, num_slots, eager=eager, vocab_size=vocab_size)
        case BlockHead():
            return BlockExecutor(files, device, dtype, num_slots, eager=eager, vocab_size=vocab_size)
        case ParallelHead():
            return ParallelExecutor(files, device, dtype, num_slots, eager=eager, vocab_size=vocab_size)
