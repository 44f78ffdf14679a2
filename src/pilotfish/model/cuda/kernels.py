from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.errors import TritonError

from pilotfish.model.batch import GRAPHS, Buckets
from pilotfish.model.cuda.decoder import TritonDecoder
from pilotfish.model.cuda.drawing import drawn_at_once, noisy_best
from pilotfish.model.cuda.elementwise import InvariantNorm, rotated
from pilotfish.model.cuda.experts import InvariantExperts
from pilotfish.model.cuda.graphs import CudaRecorder, GraphCache, recordable
from pilotfish.model.cuda.products import InvariantLinear
from pilotfish.model.cuda.triton_attention import triton_tree_attention
from pilotfish.model.draws import Draws
from pilotfish.model.experts import Affine, Expert
from pilotfish.model.fused import fused
from pilotfish.model.kernels import Draw, Forward, Gate, Kernels, replace_modules
from pilotfish.model.loading.configuration import ARCHITECTURES
from pilotfish.model.sampling import PERTURBED

PERTURBED["cuda"] = noisy_best


def recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def seconds_between(end: torch.cuda.Event, start: torch.cuda.Event) -> float:
    return float(start.elapsed_time(end)) / 1000


class CUDAKernels(Kernels):
    records = True
    failures = (TritonError, RuntimeError)  # as of a launcher that no C compiler was there for
    attend = staticmethod(triton_tree_attention)
    moment, seconds = staticmethod(recorded_event), staticmethod(seconds_between)
    wait = staticmethod(torch.cuda.Event.synchronize)

    def buckets(self) -> Buckets:
        return GRAPHS

    def replace(self, model: Any, context: int, *, alone: bool) -> Any:
        replace_modules(super().replace(model, context, alone=alone), partial(fused, self))
        plain = ARCHITECTURES[type(model).__name__].get("plain", False) and recordable(model.config)
        return TritonDecoder(model, context) if plain and alone and TritonDecoder.fits(model) else model

    def recorded(self, forward: Forward, draw: Draw) -> Forward:
        return GraphCache(forward, draw, CudaRecorder(), self.device, self.moment)

    def draw(self, logits: Tensor, draws: Draws, ids: Tensor | None = None) -> Tensor:
        return drawn_at_once(logits, draws, ids)

    def linear(self, *affines: Affine) -> InvariantLinear:
        return InvariantLinear(*affines)

    def rms_norm(self, weight: Tensor, eps: float, parts: int = 1) -> InvariantNorm:
        return InvariantNorm(weight, eps, parts)

    def mixture(self, experts: Sequence[Expert], gated: Gate) -> InvariantExperts:
        return InvariantExperts(experts, gated)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, per_angle: int = 1) -> Tensor:
        return rotated(x, cos, sin, per_angle)
