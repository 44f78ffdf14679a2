"""The chart of a comparison with other engines."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from typer.testing import CliRunner

from pilotfish.bench import app
from pilotfish.bench.headline import read_comparison
from pilotfish.errors import ParameterError

SPEEDS = {"off": 40.0, "async": 80.5, "transformers": 20.0, "<llama> & co": 30.0}


@pytest.fixture
def result(tmp_path: Path) -> Path:
    """What `bench compare --out` writes, but for what the chart does not read."""
    path = tmp_path / "compare.json"
    speeds = [
        {"contestant": name, "temperature": 0.0, "tokens_per_second": {"median": speed, "count": 3}}
        for name, speed in SPEEDS.items()
    ]
    sampled = {"contestant": "off", "temperature": 0.8, "tokens_per_second": {"median": 1.0}}
    engines = [{"contestant": n, "engine": "Pilotfish" if n in ("off", "async") else n} for n in SPEEDS]
    path.write_bytes(msgspec.json.encode({"speeds": [*speeds, sampled], "contestants": engines, "versions": {}}))
    return path


def test_bars_stand_by_speed_and_ours_in_colour(result: Path, tmp_path: Path) -> None:
    out = tmp_path / "chart.svg"
    CliRunner().invoke(app, ["chart", str(result), "--svg", str(out), "--title", "a < b"], catch_exceptions=False)
    bars = [(one.get("class"), float(str(one.get("width")))) for one in ElementTree.parse(out).iter() if one.get("rx")]
    assert [style for style, _ in bars] == ["ours", "plain", "other", "other"]
    widths = [width for _, width in bars]
    assert widths == pytest.approx([widths[0] * speed / 80.5 for speed in (80.5, 40, 30, 20)], rel=0.01)
    words = {one.text for one in ElementTree.parse(out).iter() if one.tag.endswith("text")}
    assert {"a < b", "Pilotfish, async", "Pilotfish, off", "<llama> & co", "80.5"} <= words


def test_what_is_no_comparison_is_refused(result: Path) -> None:
    result.write_text("{}")
    garbage = result.with_name("garbage.json")
    garbage.write_bytes(b'{"speeds": "\xff"}')
    for path in (result, garbage, result.with_name("missing.json")):
        with pytest.raises(ParameterError, match=r"result: .* a result of bench compare"):
            read_comparison(path)
