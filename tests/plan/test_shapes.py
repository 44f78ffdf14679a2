"""Models as numbers of weights, against what their publishers say and against formulas by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.config.hardware.shapes import MODELS

KV_BYTES = {
    "llama-3.2-1b": 32768,
    "llama-3.1-70b": 327680,
    "llama-3.1-405b": 516096,
    "qwen2.5-0.5b": 12288,
    "qwen3-235b-a22b": 192512,
    "deepseek-v3": 70272,
    "kimi-k2": 70272,
    "gpt-oss-120b": 73728,
}
#: Billions that a token is multiplied by, as published.
ACTIVE = {"qwen3-235b-a22b": 22, "deepseek-v3": 37, "kimi-k2": 32, "gpt-oss-120b": 5.1}
EXPERTS = [name for name, model in MODELS.items() if model.experts]


def test_parameters_are_those_published() -> None:
    for name, model in MODELS.items():
        tolerance = 0.02 if "published" in model.unverified else 0.0125  # 1.7 is 1.72
        assert model.parameters / 1e9 == pytest.approx(model.published, rel=tolerance), name


def test_kv_is_that_of_the_configuration() -> None:
    assert {name: MODELS[name].kv_values * 2 for name in KV_BYTES} == KV_BYTES


def test_a_token_goes_through_the_active_parameters() -> None:
    assert {name: MODELS[name].multiplied / 1e9 for name in ACTIVE} == pytest.approx(ACTIVE, rel=0.03)


def test_a_layer_by_hand() -> None:
    """Llama-3.1-8B: queries and outputs 2 x 4096 x 4096, keys and values 2 x 4096 x 1024, three matrices of the MLP."""
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    model = MODELS["llama-3.1-8b"]
    assert model.read(1) == model.read(999) == 32 * layer
    assert model.multiplied == 32 * layer + 128256 * 4096
    assert model.parameters == 32 * layer + 2 * 128256 * 4096


def test_latent_attention_by_hand() -> None:
    """DeepSeek-V3: query ranks, the cached rank with 64 positions, keys and values out of it, the output."""
    model = MODELS["deepseek-v3"]
    assert model.latent is not None
    queries = 7168 * 1536 + 1536 * 128 * 192
    keys_and_values = 7168 * 576 + 512 * 128 * 256
    assert model.latent.weights(7168, 128) == queries + keys_and_values + 128 * 128 * 7168


def test_tokens_touch_experts_by_chance() -> None:
    for name, touched in (("deepseek-v3", {1: 8, 4: 31, 8: 57, 32: 163}), ("gpt-oss-120b", {8: 29})):
        experts = MODELS[name].experts
        assert experts is not None and {rows: round(experts.touched(rows)) for rows in touched} == touched


@given(st.sampled_from(EXPERTS), st.integers(1, 4096), st.integers(1, 4096))
def test_more_rows_read_no_less_and_never_more_than_all(name: str, few: int, more: int) -> None:
    model = MODELS[name]
    embeddings = model.head * (1 if model.tied else 2)
    assert model.read(few) <= model.read(few + more) <= model.parameters - embeddings


@given(st.sampled_from(list(MODELS)), st.integers(0, 1 << 20))
def test_without_a_window_all_kv_is_read(name: str, context: int) -> None:
    model = MODELS[name]
    whole = model.kv_values * context
    assert model.kv_read(context) <= whole
    assert (model.kv_read(context) == whole) == (not model.windowed_layers or context <= model.window)
