"""The cost model: a forward by hand, and laws that hold whatever is placed where."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pilotfish.config.hardware.cost import ForwardLoad, PlacedModel
from pilotfish.config.hardware.shapes import MODELS
from pilotfish.config.hardware.tables import DEVICES, ENGINES

LAYER, ALL_REDUCE = 26.45e-6, 13.1e-6
USABLE = [name for name, device in DEVICES.items() if device.bf16 is not None]
models, devices = st.sampled_from(list(MODELS)), st.sampled_from(USABLE)
loads = st.builds(
    ForwardLoad, rows=st.integers(1, 4096), sequences=st.integers(1, 256), context=st.integers(0, 1 << 17)
)


def placed(model: str, device: str, count: int = 1, **more: Any) -> PlacedModel:
    more = {"engine": ENGINES["trtllm@h200"], **more}
    return PlacedModel(model=MODELS[model], device=DEVICES[device], count=count, **more)


def test_one_forward_by_hand() -> None:
    """Weights 2 x 69.50e9 bytes, products 2 x 69.50e9 x 16, KV of two sequences 2 x 1000 x 327680 bytes; 80 layers,
    whose all-reduces pass 1.5 x 16 x 8192 x 2 bytes at 0.84 of 450 GB/s."""
    seconds = placed("llama-3.1-70b", "h200", 4).seconds(ForwardLoad(rows=16, sequences=2, context=1000))
    roofline = 139.004e9 / (4 * 4.08e12) + 139.004e9 * 16 / (4 * 593.4e12) + 655.36e6 / (4 * 2.88e12)
    all_reduce = ALL_REDUCE + 1.5 * 16 * 8192 * 2 / (0.84 * 450e9)
    assert seconds == pytest.approx(roofline + 80 * (LAYER + 2 * all_reduce), rel=1e-5)


def test_one_device_passes_nothing() -> None:
    one, two = (placed("llama-3.1-8b", "h100", count).seconds(ForwardLoad(rows=1)) for count in (1, 2))
    reading = 2 * 7.5047e9 / (0.85 * 3.35e12) + 2 * 7.5047e9 / (0.6 * 989e12)
    assert one == pytest.approx(reading + 32 * LAYER, rel=1e-4)
    assert two == pytest.approx(reading / 2 + 32 * (LAYER + 2 * ALL_REDUCE), rel=1e-3)


def test_the_output_embedding_keeps_16_bits() -> None:
    body, head = MODELS["llama-3.1-8b"].read(1), MODELS["llama-3.1-8b"].head
    for weights, size in (("bf16", 2.0), ("fp8", 1.0), ("int4", 0.53125)):
        assert placed("llama-3.1-8b", "h100", weights=weights).weight_bytes == body * size + 2 * head * 2


def test_eight_bit_weights_count_for_what_the_device_can_do() -> None:
    many = ForwardLoad(rows=1 << 16)
    h100, a100 = (
        [placed("llama-3.1-8b", d, weights=w).seconds(many) for w in ("fp8", "bf16")] for d in ("h100", "a100")
    )
    assert h100[0] < 0.51 * h100[1]
    assert 0.99 * a100[1] < a100[0] < a100[1]


def test_devices_beyond_the_heads_of_kv_read_copies() -> None:
    one, two, eight = (placed("qwen2.5-0.5b", "h100", count) for count in (1, 2, 8))  # 2 KV heads
    assert two.context_seconds(1000) == eight.context_seconds(1000) == one.context_seconds(500)
    assert eight.kv_bytes == 4 * two.kv_bytes == 4 * 12288
    latent = placed("deepseek-v3", "h200", 8)
    assert latent.context_seconds(1000) == replace(latent, count=1).context_seconds(1000)


def test_windows_bound_what_is_read() -> None:
    one = placed("gpt-oss-120b", "h200")
    assert one.context_seconds(128_000) < 0.51 * 1000 * one.context_seconds(128)


@given(models, devices, st.integers(1, 64), loads, loads)
def test_seconds_never_fall_with_rows_sequences_or_context(
    model: str, device: str, count: int, load: ForwardLoad, more: ForwardLoad
) -> None:
    one = placed(model, device, count)
    for field in ("rows", "sequences", "context"):
        larger = replace(load, **{field: getattr(load, field) + getattr(more, field)})
        assert one.seconds(larger) >= one.seconds(load) * (1 - 1e-12)


@given(models, devices, st.integers(1, 64), st.integers(1, 64), loads)
def test_more_devices_cost_no_more_than_their_all_reduces(
    model: str, device: str, few: int, more: int, load: ForwardLoad
) -> None:
    fewer, all_of_them = placed(model, device, few), placed(model, device, few + more)
    most = 2 * MODELS[model].layers * all_of_them.all_reduce(load.rows)
    assert all_of_them.seconds(load) <= (fewer.seconds(load) + most) * (1 + 1e-12)


def test_parts_are_the_whole() -> None:
    load = ForwardLoad(rows=16, sequences=2, context=1000)
    four = placed("llama-3.1-70b", "h200", 4)
    parts = four.parts(load)
    assert parts.all_reduces == pytest.approx(160 * four.all_reduce(16)) and parts.layers == pytest.approx(80 * LAYER)
    assert parts.kv == pytest.approx(655.36e6 / (4 * 2.88e12)) and parts.exchange == 0
    assert four.seconds(load) == parts.seconds


def test_rows_attend_to_their_context() -> None:
    """Queries and values: 2 products of 64 heads of 128 with each of 1000 tokens, in 80 layers; as BF16."""
    seconds = placed("llama-3.1-70b", "h200", weights="fp8").context_products_seconds(16, 1000)
    assert seconds == pytest.approx(2 * 80 * 64 * 2 * 128 * 1000 * 16 / (0.6 * 989e12))
