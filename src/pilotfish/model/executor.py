"""The executor of a model that torch runs in this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from pilotfish.core.executor import ForwardSeconds, Outcome, Sampling, SequenceRows, TokenLogprobs
from pilotfish.core.tree import NO_TOKEN
from pilotfish.model.pacer import Pacer
from pilotfish.model.runner import Runner
from pilotfish.model.sampling import likely_tokens, non_finite_rows, sample, token_logprobs, without_rows


class TorchExecutor:
    """Implements `core.executor.Executor` over a runner."""

    def __init__(
        self,
        runner: Runner,
        pacer: Pacer | None = None,
        vocab_size: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`pacer` holds back the forward and sampling, as a target's pace does. Tokens from `vocab_size` on are never
        given: models of one tokenizer may pad their vocabularies differently."""
        self.runner = runner
        self.num_slots = runner.num_slots
        self.context = runner.model.shape.context
        self.vocab_size = runner.model.shape.vocab_size
        self.pacer = pacer
        self._given = vocab_size
        self._clock = clock

    def padded(self, rows: int) -> int:
        return self.runner.buckets.pad_rows(rows)

    def execute(self, rows: Sequence[SequenceRows], sampling: Sampling) -> Outcome:
        began = self._clock()
        batches = self.runner.prepare(rows)
        prepared = self._clock()
        logits = self.runner.run(batches)
        computed = self._clock()
        broken = non_finite_rows(logits)
        tokens, log_chances = self._sampled(logits, broken, sampling)
        sampled = self._clock() - computed
        if self.pacer is not None:
            self.pacer.hold(prepared, sum(sequence.num_rows for sequence in rows))
        model = self._clock() - prepared - sampled  # the forward is what is paced, as far as the times tell

        def logprobs(kept: Sequence[int], tokens: Sequence[int], top: int) -> list[TokenLogprobs]:
            return token_logprobs(logits[kept], tokens, top)

        return Outcome(tokens, log_chances, broken, logprobs, ForwardSeconds(prepared - began, model, sampled))

    def _sampled(
        self, logits: torch.Tensor, broken: Sequence[int], sampling: Sampling
    ) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
        """Tokens and chances as `Outcome` has them. logits [kept rows, vocab], raw."""
        if not len(sampling):
            return np.zeros(0, np.int64), None
        usable = without_rows(logits, broken) if broken else logits
        if sampling.rows is not None:
            usable = usable[torch.from_numpy(sampling.rows).to(logits.device)]
        if sampling.children:
            tokens, log_chances = likely_tokens(usable[:, : self._given], sampling)
            if broken:
                log_chances[_among(broken, sampling)] = -np.inf
            return tokens, log_chances
        drawn = np.array(sample(usable[:, : self._given], sampling), np.int64)
        if broken:
            drawn[_among(broken, sampling)] = NO_TOKEN
        return drawn, None


def _among(broken: Sequence[int], sampling: Sampling) -> NDArray[np.bool_]:
    """Which samples' rows are broken. [samples]"""
    return np.isin(np.arange(len(sampling)) if sampling.rows is None else sampling.rows, broken)
