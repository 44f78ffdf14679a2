"""The executor of a model that torch runs in this process. Anything that runs on a device runs from here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.core.executor import ForwardSeconds, Outcome, Sampling, SequenceRows
from pilotfish.core.layer_progress import LayerProgress
from pilotfish.core.tree import NO_TOKEN
from pilotfish.model.batch import EXACT, Batch, library_buckets
from pilotfish.model.graphs import CudaRecorder, GraphCache
from pilotfish.model.kv_planes import empty_kv
from pilotfish.model.loader import LoadedModel
from pilotfish.model.pacer import Pacer
from pilotfish.model.sampling import likely_tokens, non_finite_rows, sample, token_logprobs

Together = Callable[[Batch], AbstractContextManager[None]]


class TorchExecutor:
    """Implements `core.executor.Executor`: runs a loaded model over a pool of KV slots, and samples.

    A row's logits do not depend on the rows that share its forward: with the C++ kernels by how they
    reduce, otherwise because rows are padded to a few fixed counts (`Buckets`; bfloat16 on CUDA excepted).
    """

    def __init__(
        self,
        model: LoadedModel,
        num_slots: int,
        pacer: Pacer | None = None,
        vocab_size: int | None = None,
        together: Together = lambda _: nullcontext(),
    ) -> None:
        """`pacer` holds back the forward and sampling, as a target's pace does. Tokens from `vocab_size` on are never
        given: models of one tokenizer may pad their vocabularies differently. `together` has other ranks run the same
        batch meanwhile."""
        config = model.config
        self.model = model
        self.num_slots = num_slots
        self.context = config.context
        self.vocab_size = config.vocab_size
        self.pacer = pacer
        self.progress = LayerProgress(config.num_hidden_layers)
        self.kv = empty_kv(model.part, model.kv_dtype, num_slots, model.device)
        self.buckets = EXACT if model.native else library_buckets(model.device, model.dtype)
        self._given = vocab_size
        self._together = together
        self._forward: Callable[[Batch], Tensor] = self._run_model
        if model.recordable:
            self._forward = GraphCache(self._run_model, CudaRecorder(), model.device)

    def padded(self, rows: int) -> int:
        return self.buckets.pad_rows(rows)

    def execute(self, rows: Sequence[SequenceRows], sampling: Sampling) -> Outcome:
        began = time.perf_counter()
        batches = self.prepare(rows)
        prepared = time.perf_counter()
        if sampling.masks is not None:
            sampling.masks.begin()
        if self.pacer is not None:
            num_rows = sum(sequence.num_rows for sequence in rows)
            self.progress.hold(prepared, self.pacer.pace.seconds(num_rows))
        logits = self.run(batches)
        computed = time.perf_counter()
        broken = non_finite_rows(logits)
        tokens, log_chances = self._sampled(logits, broken, sampling)
        sampled = time.perf_counter() - computed
        if self.pacer is not None:
            self.pacer.hold(prepared, num_rows)
        model = time.perf_counter() - prepared - sampled  # the forward is what is paced, as far as the times tell
        logprobs = partial(token_logprobs, logits)
        return Outcome(tokens, log_chances, broken, logprobs, ForwardSeconds(prepared - began, model, sampled))

    def _sampled(
        self, logits: Tensor, broken: Sequence[int], sampling: Sampling
    ) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
        """Tokens and chances as `Outcome` has them. logits [kept rows, vocab], raw."""
        if not len(sampling):
            return np.zeros(0, np.int64), None
        usable = logits.index_fill(0, torch.tensor(broken, device=logits.device), 0.0) if broken else logits
        if sampling.rows is not None:
            usable = usable[torch.from_numpy(sampling.rows).to(logits.device)]
        given = usable[:, : self._given]
        drawn = likely_tokens(given, sampling) if sampling.children else (np.array(sample(given, sampling)), None)
        if broken:
            rows = np.arange(len(sampling)) if sampling.rows is None else sampling.rows
            told, none = (drawn[0], NO_TOKEN) if drawn[1] is None else (drawn[1], -np.inf)
            told[np.isin(rows, broken)] = none
        return drawn

    def forward(self, sequences: Sequence[SequenceRows]) -> Tensor:
        """Write KV and return logits, float32 [kept rows, vocab]: of each sequence in order the committed rows
        in `kept`, then its nodes."""
        return self.run(self.prepare(sequences))

    def prepare(self, sequences: Sequence[SequenceRows]) -> list[Batch]:
        """The tensors of a forward, in host memory; of several forwards, where there are more rows than the
        largest bucket takes."""
        return Batch.build(sequences, self.buckets, self.num_slots)

    @torch.inference_mode()
    def run(self, batches: Sequence[Batch]) -> Tensor:
        """The forward itself; see `forward`."""
        logits = []
        for batch in batches:
            with self._together(batch):
                logits.append(self._forward(batch)[: batch.num_kept].float())
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _run_model(self, batch: Batch) -> Tensor:
        """Logits of the kept rows, padding included. [kept rows, vocab]. On CUDA nobody counts layers: they are
        computed later than they are asked for."""
        counts = batch.last and self.model.device.type == "cpu"
        batch = batch.map(lambda tensor: tensor.to(self.model.device))
        output = self.model.module(
            input_ids=batch.input_ids[None],
            position_ids=batch.metadata.row_positions.clamp(min=0)[None],
            logits_to_keep=batch.keep,
            use_cache=False,
            metadata=batch.metadata,
            kv=self.kv,
            progress=self.progress if counts else None,
        )
        return output.logits[0]  # type: ignore[no-any-return]
