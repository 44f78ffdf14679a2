import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pilotfish.model.batch import Batch, Forwarded
from pilotfish.model.draws import Draws

#: Runs and records a call; returns a function that replays it.
Record = Callable[[Callable[[], None]], Callable[[], None]]


#: Bytes at whose multiples tensors begin in a buffer, so that kernels read them in whole words.
ALIGNMENT = 16
#: Bytes of a batch that fit at first: eight million positions of prefixes.
FIRST = 32 * 2**20


class Mirror:
    """Memory on the device that one copy from pinned memory fills: a batch's tensors end to end, the prefixes' slots
    last, which have all the rest."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, on_cuda = size, device.type == "cuda"
        self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=on_cuda)
        self._mirrored = torch.empty(size, dtype=torch.uint8, device=device)
        self._sent = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]

    def places(self, batch: Batch) -> tuple[Batch, Batch]:
        """Of a batch of these sizes: what to `fill`, and what is on the device then."""
        return _cut(self._pinned, batch), _cut(self._mirrored, batch)

    def fill(self, places: Batch, batch: Batch) -> None:
        if self._sent is not None:
            self._sent.synchronize()  # what was pinned last may still be on its way
        for place, given in zip(places.tensors(), batch.tensors(), strict=True):
            place[: len(given)].copy_(given)
        used = sum(_sizes(batch))
        self._mirrored[:used].copy_(self._pinned[:used], non_blocking=True)
        if self._sent is not None:
            self._sent.record()


def _sizes(batch: Batch) -> list[int]:
    return [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in batch.tensors()]


def _cut(buffer: Tensor, batch: Batch) -> Batch:
    *sizes, _ = _sizes(batch)
    *parts, rest = torch.split(buffer, [*sizes, len(buffer) - sum(sizes)])
    places = [part[: x.nbytes].view(x.dtype).view(x.shape) for part, x in zip(parts, batch.tensors(), strict=False)]
    each = iter([*places, rest.view(batch.metadata.prefix_slots.dtype)])
    return replace(batch, follows=None).map(lambda _: next(each))


@dataclass(frozen=True)
class Recorded:
    inputs: Batch  # pinned
    read: Batch
    outputs: list[Tensor]
    replay: Callable[[], None]
    masked: "MaskedDraw | None"


@dataclass(frozen=True)
class MaskedDraw:
    bits: Tensor  # as in `Draws`
    drawn: Tensor
    replay: Callable[[], None]

    @torch.inference_mode()
    def __call__(self, bits: Tensor) -> Tensor:
        self.bits[: len(bits), : bits.shape[1]].copy_(bits)
        self.replay()
        return self.drawn.clone()


class GraphCache:
    """Graphs run one after another, so all read the same memory, and those of one size write to the same. What is
    masked is drawn by a second graph, once the masks are there."""

    def __init__(
        self,
        forward: Callable[[Batch], Forwarded],
        draw: Callable[[Tensor, Draws], Tensor],
        record: Record,
        device: torch.device,
    ) -> None:
        self._forward, self._draw, self._record, self._device = forward, draw, record, device
        self._mirror = Mirror(FIRST, device)
        self._graphs: dict[tuple[object, ...], Recorded] = {}
        self._outputs: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def __call__(self, batch: Batch) -> Forwarded:
        size = sum(_sizes(batch))
        if size > self._mirror.size:
            self._graphs.clear()  # they read the old one
            self._mirror = Mirror(1 << size.bit_length(), self._device)
        draws = None if batch.draws is None else batch.draws.kind
        key = (batch.metadata.longest, batch.last, draws, *(tensor.shape for tensor in batch.tensors()[:-1]))
        if key not in self._graphs:
            self._graphs[key] = self._recorded(batch)
        graph = self._graphs[key]
        self._mirror.fill(graph.inputs, batch)
        graph.read.take_tokens(batch)
        graph.replay()
        outputs = [output.clone() for output in graph.outputs]
        return Forwarded(outputs[0], outputs[1] if len(outputs) > 1 else None, graph.masked)

    def _recorded(self, batch: Batch) -> Recorded:
        inputs, read = self._mirror.places(batch)
        self._mirror.fill(inputs, batch)
        read.take_tokens(batch)
        first = self._forward(read).tensors()  # compiles kernels and sets libraries up, which cannot be recorded
        outputs = [self._outputs.setdefault((each.shape, each.dtype), torch.empty_like(each)) for each in first]

        def run() -> None:
            for output, given in zip(outputs, self._forward(read).tensors(), strict=True):
                output.copy_(given)

        return Recorded(inputs, read, outputs, self._record(run), self._masked(read.draws, outputs[0]))

    def _masked(self, draws: Draws | None, logits: Tensor) -> MaskedDraw | None:
        """Reads where the forward's graph writes."""
        if draws is None or not draws.masked:
            return None
        bits = torch.full((draws.samples, -(-logits.shape[1] // 32)), -1, dtype=torch.int32, device=self._device)
        draws = replace(draws, bits=bits)
        drawn = self._draw(logits, draws)

        def run() -> None:
            drawn.copy_(self._draw(logits, draws))

        return MaskedDraw(bits, drawn, self._record(run))


class CudaRecorder:
    """Graphs share scratch memory, so they run one after another and each result is copied at once. Other threads copy
    KV meanwhile (`kv_copy.DeviceCopier`): only this thread's calls can spoil a recording."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, call: Callable[[], None]) -> Callable[[], None]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            call()  # libraries keep their workspaces by stream
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            call()
        replay: Callable[[], None] = graph.replay
        return replay


def recordable(config: Any) -> bool:
    """False for models whose forward reads back its own results: dynamic rotary embeddings."""
    return "dynamic" not in str(config.to_dict().get("rope_parameters"))


def use_reproducible_products() -> None:
    """cuBLAS without TF32, with sums of bfloat16 products in float32, and with workspaces of a fixed size."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
