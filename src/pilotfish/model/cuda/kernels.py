from __future__ import annotations

from typing import Any

from pilotfish.model.cuda.graphs import CudaRecorder, GraphCache, recordable
from pilotfish.model.cuda.triton_attention import triton_tree_attention
from pilotfish.model.kernels import Forward, Kernels


class CUDAKernels(Kernels):
    attend = staticmethod(triton_tree_attention)

    def records(self, config: Any) -> bool:
        return recordable(config)

    def recorded(self, forward: Forward) -> Forward:
        return GraphCache(forward, CudaRecorder(), self.device)
