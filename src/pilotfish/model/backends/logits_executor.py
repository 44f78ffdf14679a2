import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from pilotfish.core.scheduling.executor import ANY_DEPTH, ForwardSeconds, Outcome, Sampling, SequenceRows
from pilotfish.model.cpu.native import load_kernels
from pilotfish.model.logprobs import token_logprobs
from pilotfish.model.sampling import drawn


class LogitsExecutor(ABC):
    deepest = ANY_DEPTH

    def __init__(self, num_slots: int, context: int, vocab_size: int, given: int) -> None:
        """Tokens from `given` on are never drawn."""
        self.num_slots, self.context, self.vocab_size = num_slots, context, vocab_size
        self._given = given
        load_kernels()  # of sampling; without them it is slower

    def padded(self, rows: int) -> int:
        return rows

    @abstractmethod
    def logits(self, rows: Sequence[SequenceRows]) -> Tensor:
        """Keep KV of all rows; float32 [kept rows, vocab]."""

    def execute(self, rows: Sequence[SequenceRows], sampling: Sampling) -> Outcome:
        began = time.perf_counter()
        if sampling.masks is not None:
            sampling.masks.begin()
        logits = self.logits(rows)
        computed = time.perf_counter()
        tokens, log_chances, broken = drawn(logits, sampling, self._given)
        seconds = ForwardSeconds(model=computed - began, sample=time.perf_counter() - computed)
        return Outcome(tokens, log_chances, broken, partial(token_logprobs, logits), seconds)
