import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pilotfish.model.batch import Batch

#: Runs and records a call; returns a function that replays it, and the tensor that it writes.
Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


#: Bytes at whose multiples tensors begin in a buffer, so that kernels read them in whole words.
ALIGNMENT = 16


class Mirror:
    """A batch on the device, always in the same memory, that one copy from pinned memory fills."""

    def __init__(self, batch: Batch, device: torch.device) -> None:
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in batch.tensors()]
        on_cuda = device.type == "cuda"
        self._pinned = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=on_cuda)
        self._mirrored = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        self._sources, self.batch = _cut(self._pinned, batch, sizes), _cut(self._mirrored, batch, sizes)
        self._sent = torch.cuda.Event() if on_cuda else None  # type: ignore[no-untyped-call]

    def fill(self, batch: Batch) -> None:
        if self._sent is not None:
            self._sent.synchronize()  # what was pinned last may still be on its way
        for mine, given in zip(self._sources.tensors(), batch.tensors(), strict=True):
            mine.copy_(given)
        self._mirrored.copy_(self._pinned, non_blocking=True)
        if self._sent is not None:
            self._sent.record()


def _cut(buffer: Tensor, batch: Batch, sizes: list[int]) -> Batch:
    """The tensors of `batch`, end to end in the buffer."""
    parts = iter(torch.split(buffer, sizes))
    return batch.map(lambda tensor: next(parts)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape))


class GraphCache:
    def __init__(self, forward: Callable[[Batch], Tensor], record: Record, device: torch.device) -> None:
        self._forward, self._record, self._device = forward, record, device
        #: What a recorded forward reads, how to replay it, and the tensor that it writes, all in the memory that they
        #: had when it was recorded.
        self._graphs: dict[tuple[torch.Size, ...], tuple[Mirror, Callable[[], None], Tensor]] = {}
        self._outputs: dict[torch.Size, Tensor] = {}  # shared, as graphs run one after another

    def __call__(self, batch: Batch) -> Tensor:
        shapes = tuple(tensor.shape for tensor in batch.tensors())
        if shapes not in self._graphs:
            self._graphs[shapes] = self._recorded(batch)
        mirror, replay, output = self._graphs[shapes]
        mirror.fill(batch)
        replay()
        return output.clone()

    def _recorded(self, batch: Batch) -> tuple[Mirror, Callable[[], None], Tensor]:
        mirror = Mirror(batch, self._device)
        mirror.fill(batch)
        first = self._forward(mirror.batch)  # compiles kernels and sets libraries up, which cannot be recorded
        output = self._outputs.setdefault(first.shape, torch.empty_like(first))
        return (mirror, *self._record(lambda: output.copy_(self._forward(mirror.batch))))


class CudaRecorder:
    """Graphs share scratch memory, so they run one after another and each result is copied at once. Other threads copy
    KV meanwhile (`kv_copy.DeviceCopier`): only this thread's calls can spoil a recording."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, call: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            call()  # libraries keep their workspaces by stream
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = call()
        return graph.replay, output


def recordable(config: Any) -> bool:
    """False for models whose forward reads back its own results: dynamic rotary embeddings."""
    return "dynamic" not in str(config.to_dict().get("rope_parameters"))


def use_reproducible_products() -> None:
    """cuBLAS without TF32, with sums of bfloat16 products in float32, and with workspaces of a fixed size."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
