"""Tables of devices, links, models, engines: sources, units, names."""

from __future__ import annotations

import subprocess
import sys

import pytest
from msgspec import Struct, ValidationError, convert

from pilotfish.config.hardware.shapes import MODELS
from pilotfish.config.hardware.tables import DEVICES, ENGINES, LINKS, SHARES, Constant, Device, look_up
from pilotfish.errors import ParameterError
from pilotfish.plan.planner.acceptance import PAIRS
from pilotfish.plan.published import GROUPS, PUBLISHED
from pilotfish.plan.tiers import TIERS

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


def test_an_unknown_field_of_a_table_is_refused() -> None:
    with pytest.raises(ValidationError, match="unknown field `speed`"):
        convert({"speed": 1, "full_name": "a", "memory": 1, "bandwidth": 1, "link": "", "sources": ["a"]}, Device)


def test_every_constant_says_where_it_is_from() -> None:
    """Calibrated ones name a row that says the same; at most one row for an engine on some hardware."""
    for name, engine in ENGINES.items():
        rows = {constant.why for constant in constants(engine) if constant.basis == "calibrated"}
        assert all(constant.why and constant.value >= 0 for constant in constants(engine)) and len(rows) <= 1, name
        assert all(PUBLISHED[row].kind == "calibrates" and PUBLISHED[row].calibrates.endswith(name) for row in rows)
    assert all(0 < share.value <= 1 and share.basis == "assumed" for share in constants(SHARES))


@pytest.mark.parametrize(
    ("table", "name", "nearest"),
    [("models", "llama-3.1-80b", "llama-3.1-8b"), ("models", "QWEN3-9B", "qwen3-8b"), ("devices", "h300", "h100")],
)
def test_an_unknown_name_is_told_the_nearest(table: str, name: str, nearest: str) -> None:
    with pytest.raises(ParameterError) as raised:
        look_up(TABLES[table], "pace", table, name)
    told = str(raised.value)
    assert told.startswith(f"pace: {name!r} is not allowed; expected one of the {table}") and nearest in told
    assert "\n" not in told


def test_an_exchange_takes_two_latencies_and_the_bytes() -> None:
    assert LINKS["roce-400g"].exchange(1e6) == pytest.approx(2 * 2e-6 + 1e6 / 50e9)
    assert LINKS["tcp"].exchange(1e6) == pytest.approx(1e-4)  # no bandwidth is published


def test_plans_and_simulations_leave_torch_alone() -> None:
    modules = ("published", "planner.choice", "planner.recorded", "simulation.sweep")
    imports = "; ".join(f"import pilotfish.plan.{module}" for module in modules)
    code = f"import sys; {imports}; sys.exit(bool({{'torch', 'transformers'}} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
