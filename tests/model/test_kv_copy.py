"""Objects and segments of KV: what is read from slots is what is in every plane, and goes back to any others."""

import numpy as np
import pytest
import torch

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS
from pilotfish.core.prefilling.segments import KVLayout
from pilotfish.model.kv_copy import HostCopier, copier_of, layout_of
from pilotfish.model.kv_planes import FeatureKV, LayerKV, SlotPlanes

SLOTS = 300
LAYERS = 3


def pool(dtype: torch.dtype, *, features: bool = False) -> SlotPlanes:
    """Layers of random bits, NaN among them; the last are features, if there are to be any."""
    made = torch.Generator().manual_seed(0)

    def plane(*shape: int, of: torch.dtype) -> torch.Tensor:
        size = torch.empty((), dtype=of).element_size()
        return torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8, generator=made).view(of)

    heads = (SLOTS + 1, 2)
    scales = dtype == torch.int8
    layers = [
        LayerKV(
            *(plane(*heads, 24, of=dtype) for _ in range(2)),
            *(plane(*heads, of=torch.float32) for _ in range(2 * scales)),
        )
        for _ in range(LAYERS - features)
    ]
    return [*layers, FeatureKV(plane(SLOTS + 1, 40, of=torch.float32))] if features else layers


def bits(kv: SlotPlanes, slots: np.ndarray) -> list[torch.Tensor]:
    index = torch.from_numpy(slots).long()
    return [plane.view(torch.uint8)[index] for layer in kv for plane in layer]


@pytest.mark.parametrize(("dtype", "count"), [(torch.float32, 1), (torch.bfloat16, 63), (torch.int8, 64)])
@pytest.mark.parametrize("features", [False, True])
def test_what_is_read_goes_to_other_slots(dtype: torch.dtype, count: int, features: bool) -> None:
    kv, order = pool(dtype, features=features), np.random.default_rng(1).permutation(SLOTS).astype(np.int32)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(("layers", "count"), [(range(1), 1), (range(1, 3), 100), (range(LAYERS), 100)])
@pytest.mark.parametrize("features", [False, True])
def test_a_segment_is_what_its_layout_says(dtype: torch.dtype, layers: range, count: int, features: bool) -> None:
    kv, order = pool(dtype, features=features), np.random.default_rng(2).permutation(SLOTS).astype(np.int32)
    here, there, rest = np.split(order, (count, 2 * count))
    copier, layout, others = copier_of(kv), layout_of(kv), bits(kv, rest)
    data = np.empty(count * layout.bytes_of(layers), np.uint8)
    copier.read_layers(here, layers, data)
    index = torch.from_numpy(here).long()
    expected = [plane.view(torch.uint8)[index].flatten() for layer in layers for plane in kv[layer]]
    assert np.array_equal(data, torch.cat(expected).numpy())
    before = bits(kv, there)
    copier.write_layers(there, layers, data)
    of_planes = [layer for layer, planes in enumerate(kv) for _ in planes]
    for layer, was, copied, source in zip(of_planes, before, bits(kv, there), bits(kv, here), strict=True):
        assert torch.equal(copied, source if layer in layers else was)
    assert all(map(torch.equal, others, bits(kv, rest)))


def test_the_layout_of_a_pool() -> None:
    assert layout_of(pool(torch.bfloat16)) == KVLayout(LAYERS, first_head=0, heads=2, planes=[48, 48])
    assert layout_of(pool(torch.int8)) == KVLayout(LAYERS, first_head=0, heads=2, planes=[24, 24, 4, 4])
    assert layout_of(pool(torch.int8, features=True)) == KVLayout(LAYERS, 0, 2, [24, 24, 4, 4], features=160)
