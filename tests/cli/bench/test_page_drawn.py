"""The page of a result: well-formed, by itself, with every plot, and off in each; nothing of the data is markup."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import msgspec
import pytest
from typer.testing import CliRunner

from pilotfish.cli.bench.commands import app
from pilotfish.cli.pages.result import page
from pilotfish.cli.pages.saved_result import (
    OFF,
    DepthCounts,
    Made,
    MeasuredAcceptance,
    MeasuredSetting,
    RequestTimes,
    SavedResult,
    saved_result,
)

EVIL = '<script>alert("x")</script>&'
PLOTS = ["Speed-up against load", "Throughput", "Latency at 1 at a time", "Acceptance by depth"]


def checked(text: str) -> Element:
    """Its root. Every element is closed where it should be, but for those of `meta`, which have no end."""
    closed = re.sub(r"(<meta [^>]*)>", r"\1/>", text.removeprefix("<!doctype html>"))
    return ElementTree.fromstring(closed.replace(' xmlns="http://www.w3.org/2000/svg"', ""))


def spread(median: float) -> dict[str, float]:
    return {"minimum": median, "lower": 0.9 * median, "median": median, "upper": 1.1 * median, "maximum": median}


def request(setting: str, concurrency: int, at_a_time: int) -> RequestTimes:
    times = [0.25 + 0.02 * (token // at_a_time) for token in range(48)]
    known = {"setting": setting, "concurrency": concurrency, "category": EVIL, "sent": 0.125}
    return RequestTimes(**known, first=times[0], ended=times[-1], times=times)


@pytest.fixture(scope="module")
def result() -> SavedResult:
    speeds = {OFF: {1: 1.0, 8: 1.0}, "sync": {1: 1.6, 8: 0.8}, "async": {1: 2.0, 8: 1.2}}
    settings = [
        MeasuredSetting(
            setting=name, concurrency=c, tokens_per_second=spread(40 * ratio), over_off=spread(ratio), equal_outputs=1.0
        )
        for name, at in speeds.items()
        for c, ratio in at.items()
    ]
    requests = [request(name, c, tokens) for c in (1, 8) for name, tokens in ((OFF, 1), ("sync", 3), ("async", 2))]
    counts = {OFF: DepthCounts([], []), "sync": DepthCounts([10, 8], [8, 2]), "async": DepthCounts([9], [6])}
    depths = [MeasuredAcceptance(setting=name, concurrency=1, by_depth=one) for name, one in counts.items()]
    made = Made(command=f"pilotfish bench run {EVIL}", commit="abc", versions={"python": "3"})
    return SavedResult(settings, requests, depths, run=made, pace="target=20ms", dtype="float32", prompts=1)


def test_a_page_is_whole_and_by_itself(result: SavedResult) -> None:
    text = page(result)
    root = checked(text)
    drawings = [{name for part in svg.iter() for name in part.get("class", "").split()} for svg in root.iter("svg")]
    assert not {"script", "link", "img", "iframe"} & {one.tag for one in root.iter()}
    assert not any(name in ("href", "src") or name.startswith("on") for one in root.iter() for name in one.attrib)
    assert set(re.findall(r"https?://[^\"<]*", text)) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in text and "@import" not in text
    assert all(f"<h3>{title}</h3>" in text for title in PLOTS)
    assert len(drawings) == 2 + 6 + 1  # speeds, latencies, depth
    assert all("s0" in drawing or "plain" in drawing for drawing in drawings)  # off
    assert EVIL not in text and "Paced: " in text and "Every output equals" in text
    assert "it pays from 1 to 8" in text and ">4.76<" in text  # sync falls below 1 at 8 ** 0.75


def test_invalid_runs_and_unequal_outputs_are_said_at_the_top(result: SavedResult) -> None:
    late = page(SavedResult(result.settings, invalid=f"3% {EVIL}"))
    assert "No speed on this page is that of the devices" in late and list(checked(late))
    unequal: Any = MeasuredSetting(setting="sync", concurrency=1, tokens_per_second=4.0, equal_outputs=0.5)
    text = page(SavedResult([unequal], dtype="bfloat16"))
    assert "50.0% of the outputs of sync differ" in text and "Off was not measured here" in text


def test_a_server_s_requests_make_a_page_of_their_own() -> None:
    """At rates, of one setting, some without tokens, and nothing known of its drafts."""
    good = RequestTimes(setting="served", rate=2.5, sent=0.0, first=0.1, ended=0.5, times=[0.1, 0.3, 0.3, 0.5])
    lost = RequestTimes(setting="served", rate=2.5, sent=0.0, first=None, ended=0.5, times=[], error="broke off")
    told = MeasuredAcceptance(setting="served", rate=2.5, by_depth=DepthCounts([4], [2]))
    saved = msgspec.json.encode(SavedResult(requests=[good, lost], acceptance=[told], model="m"))
    text = page(saved_result(saved, "served.json"))
    assert checked(text).findall(".//svg") and "2.5 requests a second" in text and "<h1>Served: m</h1>" in text
    assert "accepts a first guess in 50% of the steps" in text


def test_a_saved_result_is_drawn_by_a_command(result: SavedResult, tmp_path: Path) -> None:
    saved, html = tmp_path / "result.json", tmp_path / "page.html"
    saved.write_bytes(msgspec.json.encode(result))
    outcome = CliRunner().invoke(app, ["page", str(saved), "--html", str(html)])
    assert outcome.exit_code == 0 and html.read_text() == page(result)
