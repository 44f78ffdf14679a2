"""Objects of KV: what is read from slots is what is in every plane, and goes back to any others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pilotfish.core.prefix_keys import OBJECT_TOKENS
from pilotfish.model.kv_copy import HostCopier, copier_of
from pilotfish.model.kv_planes import LayerKV

SLOTS = 300


def pool(dtype: torch.dtype) -> list[LayerKV]:
    """Two layers of random bits, NaN among them."""
    made = torch.Generator().manual_seed(0)

    def plane(*shape: int, of: torch.dtype) -> torch.Tensor:
        size = torch.empty((), dtype=of).element_size()
        return torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=made).view(of)

    heads = (SLOTS + 1, 2)
    scales = dtype == torch.int8
    return [
        LayerKV(
            *(plane(*heads, 24, of=dtype) for _ in range(2)),
            *(plane(*heads, of=torch.float32) for _ in range(2 * scales)),
        )
        for _ in range(2)
    ]


def bits(kv: list[LayerKV], slots: np.ndarray) -> list[torch.Tensor]:
    index = torch.from_numpy(slots).long()
    return [plane.view(torch.uint8)[index] for layer in kv for plane in layer]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("count", [1, 63, 64])
def test_what_is_read_goes_to_other_slots(dtype: torch.dtype, count: int) -> None:
    kv, order = pool(dtype), np.random.default_rng(1).permutation(SLOTS).astype(np.int32)
    here, there = order[:OBJECT_TOKENS], order[OBJECT_TOKENS : OBJECT_TOKENS + count]
    before, others = bits(kv, here), bits(kv, order[2 * OBJECT_TOKENS :])
    copier = copier_of(kv)
    assert isinstance(copier, HostCopier)
    data = copier.read(here)
    assert len(data) == copier.object_bytes == sum(plane[0].nbytes for layer in kv for plane in layer) * OBJECT_TOKENS
    copier.write(there, data)
    for plane, copied in zip(before, bits(kv, there), strict=True):
        assert torch.equal(plane[OBJECT_TOKENS - count :], copied)
    for plane, same in zip(others, bits(kv, order[2 * OBJECT_TOKENS :]), strict=True):
        assert torch.equal(plane, same)


def test_layers_lie_one_after_the_other() -> None:
    kv = pool(torch.float32)
    slots = np.arange(OBJECT_TOKENS, dtype=np.int32)
    expected = torch.cat([plane[:OBJECT_TOKENS].flatten() for layer in kv for plane in layer])
    assert np.array_equal(copier_of(kv).read(slots), expected.view(torch.uint8).numpy())
