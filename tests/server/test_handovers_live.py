"""A real server with a prefill worker: its answers, metrics, log and playground say the same of hand-overs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Playground, browser, needs_browser
from live import LiveServer

PROMPT = [3 + 7 * i % 97 for i in range(400)]
DETAILED = {"max_tokens": 4, "temperature": 0, "speculation": {"metrics": "detailed"}}
#: Seconds until the target's next status is here at the latest.
LIMIT = 20.0


@pytest.fixture(scope="module")
def server(llama: Path) -> Iterator[LiveServer]:
    with LiveServer(llama, prefill_workers=1, prefill_threshold=64) as server:
        yield server


def totals(server: LiveServer) -> dict[str, float]:
    counters = ("handovers_total", "handover_tokens_total", "handover_bytes_total", "handover_hidden_seconds_total")
    return {name: server.metric(f"pilotfish_{name}") for name in counters}


def settled(server: LiveServer, handovers: int) -> dict[str, float]:
    """Totals, once so many hand-overs are in them."""
    deadline = time.monotonic() + LIMIT
    while (
        "pilotfish_handovers_total{" not in server.get("/metrics")[1] or totals(server)["handovers_total"] < handovers
    ):
        assert time.monotonic() < deadline, server.log
        time.sleep(0.05)
    return totals(server)


def test_answers_and_metrics_say_the_same(server: LiveServer) -> None:
    status, first = server.post("/v1/completions", {"prompt": PROMPT, **DETAILED})
    assert status == 200
    again = server.post("/v1/completions", {"prompt": PROMPT, **DETAILED})[1]
    short = server.post("/v1/completions", {"prompt": PROMPT[1:50], **DETAILED})[1]
    (told,) = first["metrics"]["handovers"]
    facts: dict[str, Any] = {"pool": "prefill 0", "transport": "shm", "outcome": "whole", "tokens": 399, "cached": 0}
    assert {name: told[name] for name in facts} == facts
    assert first["metrics"]["handed_over"] == 399 and first["metrics"]["cached_by_tier"] == {}
    assert told["computing"] > 0 and told["transfer"] > 0 and 0 < told["arriving"] <= told["seconds"]
    assert told["queued"] + told["computing"] + told["exposed"] == pytest.approx(told["seconds"])
    assert again["metrics"]["cached_by_tier"] == {"device": 399}
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert all("handed_over" not in answer["metrics"] for answer in (again, short))
    counted = settled(server, handovers=1)
    assert counted == {
        "handovers_total": 1,
        "handover_tokens_total": 399,
        "handover_bytes_total": told["size"],
        "handover_hidden_seconds_total": pytest.approx(told["hidden"]),
    }
    page = server.get("/metrics")[1]
    assert 'pool="prefill 0",transport="shm"} 1.0' in page and 'source="prefill"} 399.0' in page
    assert server.metric("pilotfish_prefill_pool_transport") == server.metric("pilotfish_prefill_pool_ready") == 1
    assert server.metric("pilotfish_handover_seconds_sum") == pytest.approx(told["seconds"])
    assert "prefill 0: segments are read by shm" in server.log


def test_the_playground_shows_what_was_handed_over(server: LiveServer) -> None:
    needs_browser()
    with browser() as chromium, Playground(chromium, server.url) as playground:
        playground.run("def add(a, b):\n    return a + b\n" * 12, max_tokens="8", temperature="0")
        prompt = int(playground.shown("status").split(" · prompt ")[1].split()[0])
        sources = playground.page.locator("#sources li:visible").all_inner_texts()
        assert [line.strip() for line in sources] == [f"{prompt - 1} from a prefill worker", "1 computed"]
        assert f" {prompt - 1} tokens came from prefill 0 by shm: " in playground.shown("summary")
        assert playground.page.locator("figure .legend li").locator("visible=true").count() == 10
        assert playground.complaints == []
