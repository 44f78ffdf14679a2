"""The cost model: forwards by hand, what is refused, and laws that hold whatever is placed where."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import asdict, replace

from pilotfish.config.hardware.cost import ForwardLoad, PlacedModel
from pilotfish.config.hardware.shapes import MODELS
from pilotfish.config.hardware.tables import DEVICES, ENGINES, LINKS
from pilotfish.errors import ParameterError
from pilotfish.plan.placements import TIERS, MemoryTier, SplitModel, TieredModel

LAYER, ALL_REDUCE = 26.45e-6, 13.1e-6
USABLE = [name for name, device in DEVICES.items() if device.bf16 is not None]
models, devices = st.sampled_from(list(MODELS)), st.sampled_from(USABLE)
loads = st.builds(
    ForwardLoad, rows=st.integers(1, 4096), sequences=st.integers(1, 256), context=st.integers(0, 1 << 17)
)


def placed(model: str = "llama-3.1-8b", device: str = "h100", count: int = 1, **more: Any) -> PlacedModel:
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


@given(models, devices, st.integers(1, 64), loads, loads)
def test_more_load_never_takes_less(model: str, device: str, count: int, load: ForwardLoad, more: ForwardLoad) -> None:
    one = placed(model, device, count)
    for field in ("rows", "sequences", "context"):
        larger = replace(load, **{field: getattr(load, field) + getattr(more, field)})
        assert one.seconds(larger) >= one.seconds(load) * (1 - 1e-12)


@given(models, devices, st.integers(1, 64), st.integers(1, 64), loads)
def test_more_devices_cost_at_most_all_reduces(model: str, device: str, few: int, more: int, load: ForwardLoad) -> None:
    fewer, all_of_them = placed(model, device, few), placed(model, device, few + more)
    most = 2 * MODELS[model].layers * all_of_them.all_reduce(load.rows)
    assert all_of_them.seconds(load) <= (fewer.seconds(load) + most) * (1 + 1e-12)


def test_rows_attend_to_their_context() -> None:
    """Queries and values: 2 products of 64 heads of 128 with each of 1000 tokens, in 80 layers; as BF16."""
    seconds = placed("llama-3.1-70b", "h200", weights="fp8").context_products_seconds(16, 1000)
    assert seconds == pytest.approx(2 * 80 * 64 * 2 * 128 * 1000 * 16 / (0.6 * 989e12))


# -- parts of a model elsewhere: in slower memory, or FFNs on devices of their own


LOAD = ForwardLoad(rows=16, sequences=8, context=4096)
ENGINE = ENGINES["trtllm@h200"]
shares = st.floats(0.01, 1)


def split(batches: int = 1, **more: Any) -> SplitModel:
    attention, ffn = placed("qwen3-235b-a22b", "h200", 2), placed("qwen3-235b-a22b", "h100", 8)
    return SplitModel(**asdict(attention), ffn=ffn, link=LINKS["roce-400g"], batches=batches, **more)


def tiered(of: PlacedModel | None = None, **more: Any) -> TieredModel:
    return TieredModel(**asdict(of or placed()), **more)


def test_what_is_in_a_tier_is_read_at_its_rate() -> None:
    """Half of 2 x 7.505e9 bytes at 0.85 of 64 GB/s; a quarter of the KV, 8 x 4096 x 131072 bytes, at 0.6 of it."""
    in_tier = tiered(tier=TIERS["host"], weights_share=0.5, kv_share=0.25)
    own, parts = placed().parts(LOAD), in_tier.parts(LOAD)
    weights, kv = 2 * 7.5047e9, 8 * 4096 * 131072
    assert parts.weights == pytest.approx(weights / 0.85 * (0.5 / 3.35e12 + 0.5 / 64e9), rel=1e-4)
    assert parts.kv == pytest.approx(kv / 0.6 * (0.75 / 3.35e12 + 0.25 / 64e9))
    assert (parts.products, parts.layers) == (own.products, own.layers)


def test_room_is_that_of_the_part_that_is_full_first() -> None:
    own = placed().kv_room
    in_tier = tiered(tier=TIERS["host"], kv_share=0.5)
    assert in_tier.kv_room == 2 * min(own, TIERS["host"].memory)
    flash = tiered(tier=TIERS["hbf"], weights_share=1.0)
    assert flash.kv_room == pytest.approx(0.9 * 80e9)


def test_sides_of_a_split_hold_all_weights() -> None:
    """Attention's are 94 x 2 x 4096 x 128 x (64 + 4); embeddings have 16 bits."""
    whole, attention = MODELS["qwen3-235b-a22b"], 94 * 2 * 4096 * 128 * 68
    assert whole.attention == attention
    room = split().kv_room
    assert room == pytest.approx(2 * 141e9 * 0.9 - 2 * (attention + 2 * whole.head))


def test_one_batch_passes_both_sides_in_turn() -> None:
    """94 layers pass 16 rows of 4096 numbers of 2 bytes there and back, over 50 GB/s with 2 us each way."""
    one, whole = split(), MODELS["qwen3-235b-a22b"]
    parts = one.parts(LOAD)
    assert parts.exchange == pytest.approx(94 * (4e-6 + 2 * 16 * 4096 * 2 / 50e9))
    body = 2 * (whole.read(16) - whole.attention) / (8 * 0.85 * 3.35e12)
    assert parts.weights == pytest.approx(body + 2 * (whole.attention + whole.head) / (2 * 0.85 * 4.8e12))
    assert parts.kv == PlacedModel.parts(one, LOAD).kv
    assert parts.layers == pytest.approx(94 * ENGINE.layer.value)


def test_batches_hide_the_faster_side() -> None:
    """Many batches take as long as the slower side takes for all of them."""
    halves = ForwardLoad(rows=8, sequences=4, context=4096)
    in_turn = split().parts(halves).seconds
    two, many = split(2).parts(LOAD).seconds, split(16).parts(LOAD)
    assert in_turn <= two <= 2 * in_turn
    one_row = PlacedModel.parts(split(), ForwardLoad(rows=1, sequences=1, context=4096))
    assert many.exchange == 0 and many.kv == pytest.approx(16 * one_row.kv)  # attention is the slower side


SMALL = MemoryTier(full_name="a", memory=1e9, bandwidth=1e9, sources=("a",))


@pytest.mark.parametrize(
    ("make", "given", "why"),
    [
        (tiered, {"tier": TIERS["hbf"], "kv_share": 0.5}, "memory that can be written"),
        (tiered, {"tier": TIERS["host"], "weights_share": 1.5}, "shares of weights and KV from 0 to 1"),
        (tiered, {"tier": TIERS["host"], "kv_share": math.nan}, "shares of weights and KV from 0 to 1"),
        (tiered, {"tier": TIERS["host"]}, "a share of the weights or of the KV"),
        (tiered, {"tier": SMALL, "weights_share": 1.0}, "15.1 GB more"),
        (partial(replace, split()), {"link": LINKS["tcp"]}, "a link whose bandwidth is known"),
        (split, {"batches": 0}, "1 batch or more"),
        (partial(replace, split()), {"ffn": placed("qwen3-235b-a22b", count=2)}, "GB of FFNs do not fit"),
    ],
)
def test_places_that_make_no_sense(make: Callable[..., PlacedModel], given: dict[str, Any], why: str) -> None:
    with pytest.raises(ParameterError, match=why):
        make(**given)
