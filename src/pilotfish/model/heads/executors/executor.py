"""The executor of a head, by its family."""

from __future__ import annotations

from pilotfish.model.heads.executors.block_executor import BlockExecutor
from pilotfish.model.heads.executors.head_executor import HeadExecutor, HeadSetup
from pilotfish.model.heads.executors.masked_executor import MaskedExecutor
from pilotfish.model.heads.executors.parallel_executor import ParallelExecutor
from pilotfish.model.heads.executors.recurrent_executor import RecurrentExecutor
from pilotfish.model.heads.spec import BlockHead, HeadFiles, MaskedHead, ParallelHead, RecurrentHead


def make_head_executor(files: HeadFiles, setup: HeadSetup) -> HeadExecutor:
    match files.spec.head:
        case MaskedHead():
            return MaskedExecutor(files, setup)
        case RecurrentHead():
            return RecurrentExecutor(files, setup)
        case BlockHead():
            return BlockExecutor(files, setup)
        case ParallelHead():
            return ParallelExecutor(files, setup)
