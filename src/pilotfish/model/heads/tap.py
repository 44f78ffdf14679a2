from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from pilotfish.model.devices import kernels_of
from pilotfish.model.feature_tap import FeatureTap
from pilotfish.model.heads.parts import Parts
from pilotfish.model.heads.spec import HeadFiles, Projection
from pilotfish.model.kernels import RMSNorm


def feature_tap(files: HeadFiles, device: torch.device, dtype: torch.dtype, *, eager: bool) -> FeatureTap:
    projection, kernels = files.spec.projection, kernels_of(device, 0, eager=eager)
    project = Project.of(projection, Parts(files.tensors, kernels, dtype))
    return FeatureTap(projection.layers, projection.width, project, files.digest)


@dataclass(frozen=True)
class Project:
    """States [rows, parts * hidden] -> features [rows, width]."""

    state_norm: RMSNorm | None  # over all parts together, or each
    product: torch.nn.Module | None
    feature_norm: RMSNorm | None

    @classmethod
    def of(cls, projection: Projection, parts: Parts) -> Project:
        def norm(*names: str) -> RMSNorm:
            weights = torch.cat([parts.tensor(f"{name}.weight") for name in names])
            return parts.kernels.rms_norm(weights, projection.eps, len(names))

        states = ["input_norm"] if projection.joined_norm else []
        if projection.part_norms:
            states = [f"fc_norm.{i}" for i in range(len(projection.layers))]
        return cls(
            norm(*states) if states else None,
            parts.product(parts.affine("fc")) if projection.fc else None,
            norm("feature_norm") if projection.feature_norm else None,
        )

    def __call__(self, states: Tensor) -> Tensor:
        if self.state_norm is not None:
            states = self.state_norm(states)
        if self.product is not None:
            states = self.product(states)
        return states if self.feature_norm is None else cast(Tensor, self.feature_norm(states))
