import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from pilotfish.model.batch import Batch, Forwarded
from pilotfish.model.draws import Draws
from pilotfish.model.rules import Rules

#: Runs and records a call; returns a function that replays it.
Record = Callable[[Callable[[], None]], Callable[[], None]]


#: Bytes at whose multiples tensors begin in a buffer, so that kernels read them in whole words.
ALIGNMENT = 16
#: Bytes of a batch that fit at first: eight million positions of prefixes.
FIRST = 32 * 2**20
#: Recordings of forwards, and of draws, that are kept: those that were used last.
MOST = 256
Key = tuple[object, ...]
Inputs = TypeVar("Inputs", Batch, Draws)


class Mirror:
    """Memory on the device that one copy from pinned memory fills: tensors end to end."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, on_cuda = size, device.type == "cuda"
        self._pinned = torch.empty(size, dtype=torch.uint8, pin_memory=on_cuda)
        self._mirrored = torch.empty(size, dtype=torch.uint8, device=device)
        self._sent = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]

    def pinned(self, given: Inputs) -> Inputs:
        """Where inputs of these sizes go. A batch's last tensor, the prefixes' slots, has all the rest."""
        return _cut(self._pinned, given)

    def read(self, given: Inputs) -> Inputs:
        """Where they are on the device then."""
        return _cut(self._mirrored, given)

    def fill(self, places: Inputs, given: Inputs) -> None:
        if self._sent is not None:
            self._sent.synchronize()  # what was pinned last may still be on its way
        for place, tensor in zip(places.tensors(), given.tensors(), strict=True):
            place[: len(tensor)].copy_(tensor)
        used = sum(_sizes(given))
        self._mirrored[:used].copy_(self._pinned[:used], non_blocking=True)
        if self._sent is not None:
            self._sent.record()


def _sizes(given: Batch | Draws) -> list[int]:
    return [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in given.tensors()]


def _cut(buffer: Tensor, given: Inputs) -> Inputs:
    tensors: tuple[Tensor, ...] = given.tensors()
    sizes: list[int] = _sizes(given)
    parts = torch.split(buffer, [*sizes, len(buffer) - sum(sizes)])
    places = [part[: x.nbytes].view(x.dtype).view(x.shape) for part, x in zip(parts, tensors, strict=False)]
    if isinstance(given, Batch):
        places[-1] = buffer[sum(sizes[:-1]) :].view(tensors[-1].dtype)
    each = iter(places)
    return given.map(lambda _: next(each))


@dataclass(frozen=True)
class RecordedForward:
    pinned: Batch
    read: Batch
    outputs: list[Tensor]
    replay: Callable[[], None]


@dataclass(frozen=True)
class RecordedDraw:
    pinned: Draws
    bits: Tensor  # as in `Rules`, of draws that are masked
    drawn: Tensor
    replay: Callable[[], None]

    @torch.inference_mode()
    def __call__(self, bits: Tensor | None = None) -> Tensor:
        if bits is not None:
            self.bits[: len(bits), : bits.shape[1]].copy_(bits)
        self.replay()
        return self.drawn.clone()


class GraphCache:
    """Graphs run one after another, so all read the same memory, and those of one size write to the same. Where drawing
    takes more than parameters a second graph does it, for all forwards with so many logits; with masks, later."""

    def __init__(
        self,
        forward: Callable[[Batch], Forwarded],
        draw: Callable[[Tensor, Draws], Tensor],
        record: Record,
        device: torch.device,
        moment: Callable[[], Any] = time.perf_counter,
    ) -> None:
        self._forward, self._draw, self._record, self._device = forward, draw, record, device
        self._moment = moment
        self._mirror, self._draw_mirror = Mirror(FIRST, device), Mirror(0, device)
        self._forwards: dict[Key, RecordedForward] = {}
        self._draws: dict[Key, RecordedDraw] = {}
        self._outputs: dict[tuple[torch.Size, torch.dtype], Tensor] = {}

    def __call__(self, batch: Batch) -> Forwarded:
        later = batch.draws if batch.draws is not None and not batch.draws.plain else None
        draws = batch.draws if later is None else None
        graph = self._filled(replace(batch, draws=draws, follows=None), batch.follows)
        began, outputs = self._moment(), graph.outputs
        graph.replay()
        given = [output.clone() for output in outputs]
        if later is None:
            return Forwarded(given[0], given[1] if len(given) > 1 else None, began=began)
        draw = self._drawing(outputs[0], later)
        if later.masked:
            return Forwarded(given[0], later=draw, began=began)
        return Forwarded(given[0], draw(), began=began)

    def _filled(self, batch: Batch, follows: Tensor | None) -> RecordedForward:
        if (size := sum(_sizes(batch))) > self._mirror.size:
            self._forwards.clear()  # they read the old one
            self._mirror = Mirror(1 << size.bit_length(), self._device)
        draws = None if batch.draws is None else batch.draws.kind
        key = (batch.metadata.longest, batch.last, draws, *(tensor.shape for tensor in batch.tensors()[:-1]))
        graph = _kept(self._forwards, key, partial(self._recorded, batch, follows))
        self._fill(graph.pinned, graph.read, batch, follows)
        return graph

    def _fill(self, pinned: Batch, read: Batch, batch: Batch, follows: Tensor | None) -> None:
        self._mirror.fill(pinned, batch)
        if follows is not None:
            read.take_tokens(follows)

    def _recorded(self, batch: Batch, follows: Tensor | None) -> RecordedForward:
        pinned, read = self._mirror.pinned(batch), self._mirror.read(batch)
        self._fill(pinned, read, batch, follows)
        first = self._forward(read).tensors()  # compiles kernels and sets libraries up, which cannot be recorded
        outputs = [self._outputs.setdefault((each.shape, each.dtype), torch.empty_like(each)) for each in first]

        def run() -> None:
            for output, given in zip(outputs, self._forward(read).tensors(), strict=True):
                output.copy_(given)

        return RecordedForward(pinned, read, outputs, self._record(run))

    def _drawing(self, logits: Tensor, draws: Draws) -> RecordedDraw:
        """Reads where the forward's graph writes."""
        if (size := sum(_sizes(draws))) > self._draw_mirror.size:
            self._draws.clear()
            self._draw_mirror = Mirror(1 << size.bit_length(), self._device)
        key = (logits.data_ptr(), draws.kind, *(tensor.shape for tensor in draws.tensors()))
        draw = _kept(self._draws, key, partial(self._recorded_draw, logits, draws))
        self._draw_mirror.fill(draw.pinned, draws)
        return draw

    def _recorded_draw(self, logits: Tensor, draws: Draws) -> RecordedDraw:
        pinned, read = self._draw_mirror.pinned(draws), self._draw_mirror.read(draws)
        self._draw_mirror.fill(pinned, draws)
        bits = torch.full((draws.samples, -(-logits.shape[1] // 32)), -1, dtype=torch.int32, device=self._device)
        if draws.masked:
            read = replace(read, rules=replace(read.rules or Rules(), bits=bits))
        drawn = self._draw(logits, read)

        def run() -> None:
            drawn.copy_(self._draw(logits, read))

        return RecordedDraw(pinned, bits, drawn, self._record(run))


Graph = TypeVar("Graph")


def _kept(graphs: dict[Key, Graph], key: Key, record: Callable[[], Graph]) -> Graph:
    graph = graphs.pop(key, None) or record()
    graphs[key] = graph  # used last
    if len(graphs) > MOST:
        del graphs[next(iter(graphs))]
    return graph


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
