"""What a target makes of its hidden states for a head: norms, `fc` and a norm, over the states of several layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pilotfish.model.cpu import native
from pilotfish.model.feature_tap import FeatureTap
from pilotfish.model.heads.modules.parts import HeadNorm, Parts, runs_packed
from pilotfish.model.heads.spec import Decoder, HeadFiles, Projection


def feature_tap(files: HeadFiles, device: torch.device, dtype: torch.dtype, *, eager: bool) -> FeatureTap:
    """In the target's `dtype`, as its own layers compute; `eager` as for it."""
    projection = files.spec.projection
    packed = runs_packed(device, native.PANEL, eager=eager)
    project = Project.of(projection, Parts(files.tensors, device, dtype, packed=packed), files.spec.target_hidden)
    return FeatureTap(projection.layers, projection.width, project, files.digest)


@dataclass(frozen=True)
class Project:
    """States [rows, parts * hidden] -> features [rows, width]."""

    joined_norm: HeadNorm | None
    part_norms: PartNorms | None
    product: torch.nn.Module | None
    feature_norm: HeadNorm | None

    @classmethod
    def of(cls, projection: Projection, parts: Parts, hidden: int) -> Project:
        shape = Decoder(0, hidden, 0, 0, 0, 0, eps=projection.eps)
        return cls(
            parts.norm("input_norm", shape) if projection.joined_norm else None,
            PartNorms(parts, projection) if projection.part_norms else None,
            parts.product(parts.affine("fc")) if projection.fc else None,
            parts.norm("feature_norm", shape) if projection.feature_norm else None,
        )

    def __call__(self, states: Tensor) -> Tensor:
        if self.joined_norm is not None:
            states = self.joined_norm(states)
        if self.part_norms is not None:
            states = self.part_norms(states)
        if self.product is not None:
            states = self.product(states)
        return states if self.feature_norm is None else self.feature_norm(states)


class PartNorms:
    """An RMS norm of each layer's state."""

    def __init__(self, parts: Parts, projection: Projection) -> None:
        self.count, self.eps, self.packed = len(projection.layers), projection.eps, parts.packed
        self.weights = torch.cat([parts.tensor(f"fc_norm.{i}.weight") for i in range(self.count)])

    def __call__(self, states: Tensor) -> Tensor:
        """[rows, parts * hidden] -> likewise."""
        if self.packed:
            return torch.ops.pilotfish.rms_norm(states, self.weights, self.eps, self.count)  # type: ignore[no-any-return]
        wide = states.float().view(len(states), self.count, -1)
        scales = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return self.weights * (wide * scales).to(states.dtype).view_as(states)
