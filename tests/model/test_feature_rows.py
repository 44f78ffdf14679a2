"""Features as bytes, against torch's own types."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pilotfish.core.features.features import (
    FEATURE_TYPES,
    ITEM_BYTES,
    LARGEST,
    Features,
    FeatureType,
    coded,
    decoded_rows,
)
from pilotfish.errors import WireError

WIDTH = 6
TORCH_TYPES = {"bfloat16": torch.bfloat16, "fp8": torch.float8_e4m3fn}

LARGE = float(np.finfo(np.float32).max)
finite = st.floats(-LARGE, LARGE, width=32) | st.floats(-600.0, 600.0, width=32) | st.floats(-0.25, 0.25, width=32)
some_rows = arrays.arrays(np.float32, st.tuples(st.integers(1, 5), st.just(WIDTH)), elements=finite)


def there_and_back(features: Features, kind: FeatureType) -> Features:
    sent = coded(features, kind)
    assert sent.rows.shape == (len(features), features.shape[1] * ITEM_BYTES[kind])
    return decoded_rows(sent.rows.tobytes(), sent.scales.tobytes(), kind, features.shape[1])


def by_torch(features: Features, kind: FeatureType) -> Features:
    """What they are once they were of that type, by torch alone."""
    rows = torch.from_numpy(features.copy())
    if kind == "float32":
        return features
    if kind == "bfloat16":
        return rows.to(torch.bfloat16).float().numpy()
    scales = (rows.abs().amax(dim=1, keepdim=True) / LARGEST[kind]).clamp(min=torch.finfo(torch.float32).tiny)
    scaled = rows / scales
    rounded = scaled.to(torch.float8_e4m3fn).float() if kind == "fp8" else scaled.round().to(torch.int8).float()
    return (rounded * scales).numpy()


@pytest.mark.parametrize("kind", FEATURE_TYPES)
@given(features=some_rows)
def test_what_arrives_is_what_torch_makes_of_it(features: Features, kind: FeatureType) -> None:
    expected = by_torch(features, kind)
    unknown = ~np.isfinite(expected).all(axis=1)  # bfloat16 rounds the largest numbers to infinity
    there = there_and_back(features, kind)
    assert np.isnan(there[unknown]).all() and (there[~unknown] == expected[~unknown]).all()


@pytest.mark.parametrize("kind", FEATURE_TYPES)
def test_all_numbers_of_a_type_arrive(kind: FeatureType) -> None:
    if kind in ("float32", "int8"):
        values = np.arange(-127, 128, dtype=np.float32)
    else:
        codes = torch.arange(1 << 8 * ITEM_BYTES[kind], dtype=torch.int32)
        own = codes.to(torch.uint8 if kind == "fp8" else torch.uint16).view(TORCH_TYPES[kind]).float().numpy()
        values = own[np.isfinite(own)]
    largest = np.full(len(values), LARGEST.get(kind, 1.0), np.float32)
    features = np.stack((values, largest), axis=1)
    assert (there_and_back(features, kind) == features).all()


@pytest.mark.parametrize("kind", FEATURE_TYPES)
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_known_stays_so(kind: FeatureType, broken: float) -> None:
    features = np.ones((3, WIDTH), np.float32)
    features[1, 2] = broken
    there = there_and_back(features, kind)
    assert np.isnan(there[1]).all() and (there[[0, 2]] == 1.0).all()


@pytest.mark.parametrize("kind", FEATURE_TYPES)
def test_bytes_that_are_no_rows(kind: FeatureType) -> None:
    row, scales = bytes(WIDTH * ITEM_BYTES[kind]), bytes(4 if kind in LARGEST else 0)
    assert len(decoded_rows(row, scales, kind, WIDTH)) == 1
    for rows, given_scales in ((b"", b""), (row[:-1], scales), (row + b"\0", scales), (row, scales + bytes(4))):
        with pytest.raises(WireError, match=f"^features: .* type {kind}"):
            decoded_rows(rows, given_scales, kind, WIDTH)


@given(st.sampled_from(FEATURE_TYPES), st.binary(max_size=64), st.binary(max_size=16))
def test_any_bytes(kind: FeatureType, rows: bytes, scales: bytes) -> None:
    try:
        there = decoded_rows(rows, scales, kind, 2)
    except WireError:
        return
    assert (np.isfinite(there).all(axis=1) | np.isnan(there).all(axis=1)).all()
