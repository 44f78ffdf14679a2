"""Tables of devices, links, models, engines: sources, units, names; models as numbers of weights."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from pilotfish.config.hardware.shapes import MODELS
from pilotfish.config.hardware.tables import DEVICES, ENGINES, LINKS, SHARES, Constant
from pilotfish.plan.placements import TIERS
from pilotfish.plan.planner.acceptance import PAIRS
from pilotfish.plan.published import GROUPS, PUBLISHED

TABLES = {"devices": DEVICES, "links": LINKS, "tiers": TIERS, "models": MODELS, "published": GROUPS}


def constants(of: Struct) -> list[Constant]:
    return [value for value in map(of.__getattribute__, of.__struct_fields__) if isinstance(value, Constant)]


def test_every_entry_has_sources_and_says_what_is_unverified() -> None:
    for entries in TABLES.values():
        for name, entry in entries.items():
            assert entry.sources and all(entry.sources), name
            assert set(entry.unverified) <= set(entry.__struct_fields__), name
            assert name == name.lower()  # look-ups are in lower case
    pairs = [pair for drafts in PAIRS.values() for pair in drafts.values()]
    assert all(pair.sources and pair.why and pair.basis != "given" for pair in pairs)


def test_figures_of_devices_are_of_their_units() -> None:
    for name, device in DEVICES.items():
        assert 1e8 < device.memory < 1e13 and 1e11 < device.bandwidth < 1e17, name
        peaks = [peak for peak in (device.bf16, device.fp8, device.fp4) if peak is not None]
        assert all(1e13 < peak < 1e17 for peak in peaks) and peaks == sorted(peaks), name
        assert device.link_bandwidth is None or 1e10 < device.link_bandwidth < 1e13, name
        assert device.price is None or 0 < device.price[0] <= device.price[1], name
        assert device.power is None or 50 < device.power < 1e5, name


def test_every_constant_says_where_it_is_from() -> None:
    """Calibrated ones name a row that says the same; at most one row for an engine on some hardware."""
    for name, engine in ENGINES.items():
        rows = {constant.why for constant in constants(engine) if constant.basis == "calibrated"}
        assert all(constant.why and constant.value >= 0 for constant in constants(engine)) and len(rows) <= 1, name
        assert all(PUBLISHED[row].kind == "calibrates" and PUBLISHED[row].calibrates.endswith(name) for row in rows)
    assert all(0 < share.value <= 1 and share.basis == "assumed" for share in constants(SHARES))


def test_an_exchange_takes_two_latencies_and_the_bytes() -> None:
    assert LINKS["roce-400g"].exchange(1e6) == pytest.approx(2 * 2e-6 + 1e6 / 50e9)
    assert LINKS["tcp"].exchange(1e6) == pytest.approx(1e-4)  # no bandwidth is published


def test_plans_and_simulations_leave_torch_alone() -> None:
    modules = ("published", "planner.choice", "trace", "simulation.sweep")
    imports = "; ".join(f"import pilotfish.plan.{module}" for module in modules)
    code = f"import sys; {imports}; sys.exit(bool({{'torch', 'transformers'}} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- models as numbers of weights, against what their publishers say and against formulas by hand


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
