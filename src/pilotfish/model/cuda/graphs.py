import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pilotfish.model.batch import Batch

#: Runs and records a call; returns a function that replays it, and the tensor that it writes.
Record = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


class GraphCache:
    def __init__(self, forward: Callable[[Batch], Tensor], record: Record, device: torch.device) -> None:
        self._forward, self._record, self._device = forward, record, device
        #: The batch that a recorded forward reads, how to replay it, and the tensor that it writes, all in the memory
        #: that they had when it was recorded.
        self._graphs: dict[tuple[torch.Size, ...], tuple[Batch, Callable[[], None], Tensor]] = {}

    def __call__(self, batch: Batch) -> Tensor:
        shapes = tuple(tensor.shape for tensor in batch.tensors())
        if shapes not in self._graphs:
            own = batch.map(lambda tensor: tensor.to(self._device, copy=True))
            self._graphs[shapes] = (own, *self._record(lambda: self._forward(own)))
        static, replay, output = self._graphs[shapes]
        for mine, given in zip(static.tensors(), batch.tensors(), strict=True):
            mine.copy_(given)
        replay()
        return output.clone()


class CudaRecorder:
    """Graphs share scratch memory, so they run one after another and each result is copied at once. Other threads copy
    KV meanwhile (`kv_copy.DeviceCopier`): only this thread's calls can spoil a recording."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, call: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()  # compiles kernels and sets libraries up, which cannot be recorded
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
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
