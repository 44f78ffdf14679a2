"""Tables of devices, links, models, engines: sources, units, names."""

from __future__ import annotations

import subprocess
import sys

import pytest
from msgspec import Struct, ValidationError, convert

from pilotfish.config.hardware.shapes import MODELS
from pilotfish.config.hardware.tables import DEVICES, ENGINES, LINKS, SHARES, Constant, Device, Sourced, look_up
from pilotfish.errors import ParameterError
from pilotfish.plan.published import GROUPS, PUBLISHED
from pilotfish.plan.tiers import TIERS

TABLES = {"devices": DEVICES, "links": LINKS, "tiers": TIERS, "models": MODELS, "published": GROUPS}
ENTRIES = [(table, name) for table, entries in TABLES.items() for name in entries]


def constants(of: Struct) -> list[Constant]:
    return [value for value in map(of.__getattribute__, of.__struct_fields__) if isinstance(value, Constant)]


@pytest.mark.parametrize(("table", "name"), ENTRIES)
def test_every_entry_has_sources_and_says_what_is_unverified(table: str, name: str) -> None:
    entry: Sourced = TABLES[table][name]
    assert entry.sources and all(entry.sources)
    assert set(entry.unverified) <= set(entry.__struct_fields__)
    assert name == name.lower()  # look-ups are in lower case


@pytest.mark.parametrize("name", DEVICES)
def test_figures_of_devices_are_of_their_units(name: str) -> None:
    device = DEVICES[name]
    assert 1e8 < device.memory < 1e13 and 1e11 < device.bandwidth < 1e17
    peaks = [peak for peak in (device.bf16, device.fp8, device.fp4) if peak is not None]
    assert all(1e13 < peak < 1e17 for peak in peaks) and peaks == sorted(peaks)
    assert device.link_bandwidth is None or 1e10 < device.link_bandwidth < 1e13
    assert device.price is None or 0 < device.price[0] <= device.price[1]
    assert device.power is None or 50 < device.power < 1e5


def test_an_unknown_field_of_a_table_is_refused() -> None:
    with pytest.raises(ValidationError, match="unknown field `speed`"):
        convert({"speed": 1, "full_name": "a", "memory": 1, "bandwidth": 1, "link": "", "sources": ["a"]}, Device)


@pytest.mark.parametrize("name", ENGINES)
def test_every_constant_says_where_it_is_from(name: str) -> None:
    """Calibrated ones name a row that says the same; at most one row for an engine on some hardware."""
    rows = set()
    for constant in constants(ENGINES[name]):
        assert constant.why and constant.value >= 0
        rows |= {constant.why} if constant.basis == "calibrated" else set()
    assert len(rows) <= 1
    assert all(PUBLISHED[row].kind == "calibrates" and PUBLISHED[row].calibrates.endswith(name) for row in rows)


def test_shares_are_shares() -> None:
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


@pytest.mark.parametrize(
    "modules", [("published", "pace"), ("fleet", "fleet_plan"), ("simulated",), ("planner.choice", "planner.recorded")]
)
def test_planner_and_simulator_leave_torch_alone(modules: tuple[str, ...]) -> None:
    imports = "; ".join(f"import pilotfish.plan.{module}" for module in modules)
    code = f"import sys; {imports}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
