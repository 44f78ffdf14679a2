"""Paces: times by rows, and one line for text that is no pace."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.config.engine import EngineConfig
from pilotfish.config.hardware.cost import ForwardLoad, place
from pilotfish.config.hardware.pace import MAX_ROWS, Pace, Paces
from pilotfish.errors import ParameterError


def test_one_time_holds_up_to_64_rows_and_grows_from_there() -> None:
    for text, seconds in (("10.4ms", 0.0104), ("2600us", 0.0026), ("1.5s", 1.5), ("3ms", 0.003)):
        pace = Pace.parse(text)
        assert pace.seconds(1) == pace.seconds(64) == pytest.approx(seconds)
        assert pace.seconds(65) == pytest.approx(seconds * 65 / 64)


def test_a_table_is_linear_between_its_rows() -> None:
    pace = Pace.parse("4:10ms/32:12ms/256:20ms")
    expected = {1: 10, 4: 10, 11: 10.5, 18: 11, 32: 12, 144: 16, 256: 20, 512: 40}
    assert {rows: pace.seconds(rows) for rows in expected} == pytest.approx({r: t / 1e3 for r, t in expected.items()})
    assert [Pace.parse("32:8ms").seconds(rows) for rows in (1, 32, 48)] == pytest.approx([0.008, 0.008, 0.012])


@settings(max_examples=10)
@given(st.integers(1, MAX_ROWS))
def test_a_named_device_has_the_cost_of_the_model(rows: int) -> None:
    pace = Pace.parse("Llama-3.1-70B@H200x4")
    expected = place("llama-3.1-70b@h200x4").seconds(ForwardLoad(rows=rows, context=512))
    assert pace.seconds(rows) == pytest.approx(expected, rel=1e-9)


def test_experts_bend_a_pace() -> None:
    """Rows read ever fewer experts that none before them has read."""
    pace, placed = Pace.parse("deepseek-v3@b200x8"), place("deepseek-v3@b200x8")
    first, later = (pace.seconds(rows + 8) - pace.seconds(rows) for rows in (1, 1000))
    assert first > 10 * later
    for rows in (3, 48, 700):
        assert pace.seconds(rows) == pytest.approx(placed.seconds(ForwardLoad(rows=rows, context=512)), rel=0.05)


def test_devices_are_counted() -> None:
    for text, count in (("mi300x", 1), ("mi300xx2", 2), ("MI300Xx16", 16), ("tpu-v6ex2", 2)):
        placed = place(f"llama-3.1-8b@{text}")
        assert (placed.count, placed.device.link) == (count, "ICI 2D torus" if "tpu" in text else "Infinity Fabric")
        assert Pace.parse(f"llama-3.1-8b@{text}").seconds(1) == placed.seconds(ForwardLoad(rows=1, context=512))


def test_any_roles_may_be_paced() -> None:
    target, draft, prefill = Pace.parse("10.4ms"), Pace.parse("1:2ms/64:3ms"), Pace.parse("1:8ms/2048:90ms")
    assert Paces.parse("") == Paces() == EngineConfig(target=Path()).paces
    assert EngineConfig(target=Path(), pace="target=10.4ms").paces == Paces(target)
    assert Paces.parse("draft=1:2ms/64:3ms,target=10.4ms") == Paces(target, draft)
    assert Paces.parse("prefill=1:8ms/2048:90ms,target=10.4ms") == Paces(target, prefill=prefill)


BAD = (
    *("10.4ms", "target", "target=", "target=10.4", "target=10.4 ms", " target=1ms", "target=0ms", "target=-1ms"),
    *("target=nans", "target=1e3ms", "target=1234567s", "target=1ms,", "target=1ms,target=2ms", "verify=1ms"),
    *("prefill=1ms,prefill=1ms", "target=1ms;draft=1ms", "target=1:1ms/", "target=0:1ms", "target=65537:1ms"),
    *("target=²:1ms", "target=32:1ms/32:2ms", "target=32:1ms/16:2ms", "target=1:", "target=@", "target=llama-3.1-8b@"),
    *("target=@h100", "target=llama-3.1-8b@h100x0", "target=llama-3.1-8b@h100x99999", "target=llama-3.1-8b@h100\n"),
    *("target=llama-4@h100", "target=llama-3.1-8b@h900", "target=llama-3.1-8b@h100@h100", 5, None),
)


def test_bad_text_is_refused_in_one_line() -> None:
    for text in BAD:
        with pytest.raises(ParameterError, match=r"^pace: .* is not allowed; expected .+\Z"):
            EngineConfig(target=Path(), pace=text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("target=llama-4@h100", "'llama-4' .* models of docs/planning.md; nearest: llama-3.*$"),
        ("draft=qwen3-0.6b@h1000x2", "'h1000' .* devices, .* docs/planning.md; nearest: h100, .*$"),
        ("target=llama-3.1-70b@h100", "'llama-3.1-70b@h100' .* x2 or more: 61.1 GB of the weights do not fit$"),
        ("target=llama-3.1-8b@rubin", "'llama-3.1-8b@rubin' .* peak for bf16 is known; of this one: fp4$"),
        ("target=llama-3.1-8b@wse-3", "peak for bf16 is known; of this one: none$"),
    ],
)
def test_what_is_allowed_is_told(text: str, told: str) -> None:
    with pytest.raises(ParameterError, match=told):
        Paces.parse(text)
