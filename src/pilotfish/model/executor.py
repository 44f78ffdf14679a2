import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pilotfish.core.cache.slots import Slots
from pilotfish.core.features.features import Features
from pilotfish.core.scheduling.executor import ANY_DEPTH, ForwardSeconds, LayerProgress, Outcome, Sampling, SequenceRows
from pilotfish.model.batch import Batch, Forwarded
from pilotfish.model.draws import Draws
from pilotfish.model.feature_tap import FeatureTap, capturing, refuse_unknown_layers
from pilotfish.model.kv_planes import FeatureKV, SlotPlanes, empty_kv, zeros
from pilotfish.model.loading.loader import LoadedModel
from pilotfish.model.logprobs import token_logprobs
from pilotfish.model.pacer import Pacer
from pilotfish.model.sampling import Drawn, drawn

Together = Callable[[Batch], AbstractContextManager[None]]


class DeviceProgress(LayerProgress):
    """Counted by the device, in memory of the host that it writes when a layer is done."""

    def __init__(self, layers: int, device: torch.device) -> None:
        super().__init__(layers)
        count = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self.written, self._count = count.numpy(), count
        self._numbers = torch.arange(1, layers + 1, dtype=torch.int32, device=device)

    def wrote(self, layer: int) -> None:
        self._count.copy_(self._numbers[layer : layer + 1], non_blocking=True)


class TorchExecutor:
    """A row's logits do not depend on the rows that share its forward (`Buckets`)."""

    deepest = ANY_DEPTH

    def __init__(
        self,
        model: LoadedModel,
        num_slots: int,
        pacer: Pacer | None = None,
        vocab_size: int | None = None,
        together: Together = lambda _: nullcontext(),
        tap: FeatureTap | None = None,
    ) -> None:
        """Tokens from `vocab_size` on are never drawn: models of one tokenizer may pad their vocabularies differently.
        `together` has other ranks run the same batch. ModelError for a tap of layers that the model lacks."""
        config = model.config
        self.model = model
        self.num_slots = num_slots
        self.context = config.context
        self.vocab_size = config.vocab_size
        self.pacer = pacer
        self.tap = tap
        self._layers = empty_kv(model.part, model.kv_dtype, num_slots, model.device)
        self.kv: SlotPlanes = self._layers
        if tap is not None:
            refuse_unknown_layers(tap.layers, config.num_hidden_layers)
            self._plane = FeatureKV(zeros((num_slots + 1, tap.width), model.dtype, model.device))
            self.kv = [*self._layers, self._plane]
        self.progress = LayerProgress(len(self.kv))
        self._counts = not self.overlaps
        self.buckets = model.kernels.buckets()
        self._drawable = min(config.vocab_size, vocab_size or config.vocab_size)
        self._left: Tensor | None = None  # what the last forward has drawn, on its device
        self._collected = 0.0  # when the last outcome was
        self._together = together
        self._forward: Callable[[Batch], Forwarded] = self._run_model
        if model.recordable:
            self._forward = model.kernels.recorded(self._run_model, self._draw)

    @property
    def overlaps(self) -> bool:
        """Whether a forward runs beside this thread, which only waits for it."""
        return self.model.device.type != "cpu"

    def count_layers(self) -> LayerProgress:
        """For who reads KV beside forwards: before the first one. On a device only then, as it costs a copy a layer."""
        self._counts = True
        if self.overlaps:
            self.progress = DeviceProgress(len(self.kv), self.model.device)
        return self.progress

    def padded(self, rows: int) -> int:
        return self.buckets.pad_rows(rows)

    def execute(self, rows: Sequence[SequenceRows], sampling: Sampling) -> Outcome:
        return self.launch(rows, sampling).collect()

    def launch(self, rows: Sequence[SequenceRows], sampling: Sampling) -> "LaunchedForward":
        with self._settled():
            batches = self._drawing(self.prepare(rows), sampling)
            prepared = time.perf_counter()
            if sampling.masks is not None:
                sampling.masks.begin()
            num_rows = sum(sequence.num_rows for sequence in rows)
            if self.pacer is not None:
                self.progress.hold(prepared, self.pacer.pace.seconds(num_rows))
            moment = self.model.kernels.moment
            start, forwarded, end = moment(), self.run(batches), moment()
            self._left = forwarded.drawn
            told = None if forwarded.drawn is None else forwarded.drawn.to("cpu", non_blocking=True)
            return LaunchedForward(self, sampling, num_rows, forwarded, told, prepared, (start, end, moment()))

    def collected(self, launched: "LaunchedForward") -> Outcome:
        with self._settled():
            kernels, (start, end, told_at) = self.model.kernels, launched.moments
            told, sampling, forwarded = launched.told, launched.sampling, launched.forwarded
            if told is None:
                told = forwarded.told(sampling, self._drawable)
            else:
                kernels.wait(told_at)
            found = None if told is None else Drawn.read(told, sampling)
            if found is None or found.broken:
                found = drawn(forwarded.logits, sampling, self._drawable)
            since = max(launched.prepared, self._collected)  # it waited for the forward before
            sampled = max(time.perf_counter() - since - kernels.seconds(end, start), 0.0)
            if self.pacer is not None:
                self.pacer.hold(launched.prepared, launched.num_rows)
            self._collected = time.perf_counter()
            model = self._collected - since - sampled  # the forward is what is paced, as far as the times tell
            if launched.told is not None and self.pacer is None:  # this thread may have come late
                model, sampled = kernels.seconds(end, start), kernels.seconds(told_at, end)
            logprobs = partial(token_logprobs, forwarded.logits)
            return Outcome(*found, logprobs, ForwardSeconds(model, sampled))

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """Once it has failed, nothing computes any more that reads or writes slots."""
        try:
            yield
        except BaseException:
            if self.model.device.type == "cuda":
                torch.cuda.synchronize(self.model.device)
            raise

    def forward(self, sequences: Sequence[SequenceRows]) -> Tensor:
        """Writes KV. float32 [kept rows, vocab]: of each sequence its `kept` rows, then its nodes."""
        return self.run(self.prepare(sequences)).logits

    def prepare(self, sequences: Sequence[SequenceRows]) -> list[Batch]:
        return Batch.build(sequences, self.buckets, self.num_slots)

    def _drawing(self, batches: list[Batch], sampling: Sampling) -> list[Batch]:
        """With what a recorded forward can draw by itself."""
        if not self.model.recordable or len(batches) > 1:
            return batches
        follows = self._left if int(batches[0].input_ids.min()) < 0 else None
        draws = Draws.of(sampling, len(batches[0].keep), self._drawable)
        return [replace(batches[0], draws=draws, follows=follows)]

    @torch.inference_mode()
    def run(self, batches: Sequence[Batch]) -> Forwarded:
        """float32 logits. Only one batch may draw."""
        logits = []
        for batch in batches:
            with self._together(batch):
                forwarded = self._forward(batch)
                logits.append(forwarded.logits[: batch.num_kept].float())
        return replace(forwarded, logits=logits[0] if len(logits) == 1 else torch.cat(logits))

    @property
    def feature_width(self) -> int:
        return 0 if self.tap is None else self.tap.width

    @property
    def feature_plane(self) -> Tensor:
        """[slots + 1, width]"""
        return self._plane.features

    @torch.inference_mode()
    def features(self, slots: Slots) -> Features:
        """[len(slots), width]"""
        return self._plane.read(slots)

    def _run_model(self, batch: Batch) -> Forwarded:
        """Padding included."""
        if self.overlaps:
            batch = batch.map(lambda tensor: tensor.to(self.model.device))
        logits = self._computed(batch)
        if batch.draws is None or batch.draws.masked:
            return Forwarded(logits)
        return Forwarded(logits, self._draw(logits, batch.draws))

    def _draw(self, logits: Tensor, draws: Draws) -> Tensor:
        return self.model.kernels.draw(logits[:, : self._drawable], draws)

    def _computed(self, batch: Batch) -> Tensor:
        """[kept rows, vocab]"""
        progress = self.progress if batch.last and self._counts else None
        if self.tap is None:
            return self._logits(batch, progress)
        model, size = self.model, (len(batch.input_ids), len(self.tap.layers) * self.model.config.hidden_size)
        states = torch.empty(size, dtype=model.dtype, device=model.device)
        with capturing(model.module, self.tap.layers, states):
            logits = self._logits(batch, progress)
        self._plane.write(batch.metadata.row_slots, self.tap.project(states))
        if progress is not None:
            progress.wrote(len(self._layers))
        return logits

    def _logits(self, batch: Batch, progress: LayerProgress | None) -> Tensor:
        output = self.model.module(
            input_ids=batch.input_ids[None],
            position_ids=batch.metadata.row_positions.clamp(min=0)[None],
            logits_to_keep=batch.keep,
            use_cache=False,
            metadata=batch.metadata,
            kv=self._layers,
            attend=self.model.kernels.attend,
            progress=progress,
        )
        return output.logits[0]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class LaunchedForward:
    executor: TorchExecutor
    sampling: Sampling
    num_rows: int
    forwarded: Forwarded
    told: Tensor | None  # `forwarded.drawn`, once the last moment has come
    prepared: float
    moments: tuple[Any, Any, Any]  # of the device: before the forward, after it, after the copy

    @property
    def leaves_tokens(self) -> bool:
        unpaced = self.executor.pacer is None  # a paced forward ends later than the device's
        return self.told is not None and not self.sampling.children and self.executor.overlaps and unpaced

    def collect(self) -> Outcome:
        return self.executor.collected(self)
