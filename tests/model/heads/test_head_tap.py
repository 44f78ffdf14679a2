"""What a target makes of its hidden states for a head, against the same said in plain torch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from head_files import write_eagle3, write_target
from torch import Tensor

from pilotfish.model.devices import kernels_of
from pilotfish.model.heads.files import read_head
from pilotfish.model.heads.parts import Parts, Project, feature_tap
from pilotfish.model.heads.spec import FINAL, HeadFiles, Projection

CPU, HIDDEN, LAYERS = torch.device("cpu"), 64, (2, 4, 5)
ROWS = torch.randn(7, len(LAYERS) * HIDDEN, generator=torch.Generator().manual_seed(1)) * 3


def head(directory: Path, **fields: Any) -> HeadFiles:
    target = write_target(directory / "target", hidden=HIDDEN)
    return read_head(write_eagle3(directory / "head", target=target, layers=LAYERS, hidden=32, **fields), target)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(dim=-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    "fields",
    [
        {"bias": True, "feature_norm": True},
        {"joined_norm": True},
        {"part_norms": True, "feature_norm": True},
        {"layers": (FINAL,), "fc": False, "width": HIDDEN},
        {"layers": (3,), "fc": False, "width": HIDDEN, "part_norms": True},
    ],
    ids=str,
)
def test_every_part_of_a_projection(fields: dict[str, Any], packed: bool, dtype: torch.dtype) -> None:
    projection = Projection(**{"layers": LAYERS, "width": 48, "eps": 1e-4, **fields})
    made, shapes = torch.Generator().manual_seed(2), projection.shapes(HIDDEN)
    tensors = {name: torch.randn(shape, generator=made).to(dtype) for name, shape in shapes.items()}
    rows = ROWS[:, : len(projection.layers) * HIDDEN].to(dtype).contiguous()
    wide, of = rows.double(), {name: tensor.double() for name, tensor in tensors.items()}
    if projection.joined_norm:
        wide = normed(wide, of["input_norm.weight"], 1e-4)
    if projection.part_norms:
        parts = enumerate(wide.split(HIDDEN, dim=1))
        wide = torch.cat([normed(part, of[f"fc_norm.{i}.weight"], 1e-4) for i, part in parts], dim=1)
    if projection.fc:
        wide = wide @ of["fc.weight"].T + (of["fc.bias"] if projection.bias else 0.0)
    if projection.feature_norm:
        wide = normed(wide, of["feature_norm.weight"], 1e-4)
    project = Project.of(projection, Parts(tensors, kernels_of(CPU, 0, eager=not packed), dtype))
    features = project(rows)
    assert features.dtype == dtype and features.shape == (len(ROWS), projection.width)
    error = (features.double() - wide).abs().max() / wide.abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 0.03)


def test_a_row_of_features_depends_on_its_own_states_alone(tmp_path: Path) -> None:
    tap = feature_tap(head(tmp_path, fc_norm=True), CPU, torch.float32, eager=False)
    together = tap.project(ROWS.clone())
    for row in range(len(ROWS)):
        assert torch.equal(tap.project(ROWS[row : row + 1].clone())[0], together[row])
