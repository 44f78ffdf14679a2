"""A real server with a prefill worker: its answers, metrics, log and playground say the same of hand-overs."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Playground, browser, needs_browser
from live import LiveServer

#: No two begin alike. On a machine that is busy with other things a hand-over may take too long, and another is tried.
PROMPTS = [[3 + (7 * place + i) % 97 for place in range(400)] for i in range(5)]
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


def asked_until_whole(server: LiveServer) -> tuple[list[int], dict[str, Any], list[dict[str, Any]]]:
    """A prompt whose KV was handed over as a whole, its answer, and all hand-overs so far."""
    told: list[dict[str, Any]] = []
    for prompt in PROMPTS:
        status, answer = server.post("/v1/completions", {"prompt": prompt, **DETAILED})
        assert status == 200
        told += answer["metrics"].get("handovers", [])
        if told and told[-1]["outcome"] == "whole":
            return prompt, answer, told
    raise AssertionError(told)


def test_answers_and_metrics_say_the_same(server: LiveServer) -> None:
    prompt, first, told = asked_until_whole(server)
    again = server.post("/v1/completions", {"prompt": prompt, **DETAILED})[1]
    short = server.post("/v1/completions", {"prompt": prompt[1:50], **DETAILED})[1]
    whole, facts = told[-1], {"pool": "prefill 0", "transport": "shm", "tokens": 399, "cached": 0}
    assert {name: whole[name] for name in facts} == facts
    assert first["metrics"]["handed_over"] == 399 and first["metrics"]["cached_by_tier"] == {}
    assert whole["computing"] > 0 and whole["transfer"] > 0 and 0 < whole["arriving"] <= whole["seconds"]
    assert again["metrics"]["cached_by_tier"] == {"device": 399}
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert all("handed_over" not in answer["metrics"] for answer in (again, short))
    assert settled(server, handovers=len(told)) == {
        "handovers_total": len(told),
        "handover_tokens_total": sum(one["tokens"] for one in told),
        "handover_bytes_total": sum(one["size"] for one in told),
        "handover_hidden_seconds_total": pytest.approx(sum(one["hidden"] for one in told)),
    }
    page = server.get("/metrics")[1]
    assert 'pool="prefill 0",transport="shm"} 1.0' in page
    assert server.metric("pilotfish_prefill_pool_transport") == server.metric("pilotfish_prefill_pool_ready") == 1
    assert "prefill 0: segments are read by shm" in server.log


def test_the_playground_shows_what_was_handed_over(server: LiveServer) -> None:
    needs_browser()
    with browser() as chromium, Playground(chromium, server.url) as playground:
        for i in range(5):
            playground.run(f"# {i}\n" + "def add(a, b):\n    return a + b\n" * 12, max_tokens="8", temperature="0")
            if "tokens came from" in (summary := playground.shown("summary")):
                break
        prompt, cached = cached_of(playground.shown("status"))
        assert f" {prompt - 1 - cached} tokens came from prefill 0 by shm: " in summary
        sources = [line.strip() for line in playground.page.locator("#sources li:visible").all_inner_texts()]
        assert sources[-2:] == [f"{prompt - 1 - cached} from a prefill worker", "1 computed"]
        assert playground.page.locator("figure .legend li").locator("visible=true").count() == 10
        assert playground.complaints == []


def cached_of(status: str) -> tuple[int, int]:
    """Tokens of a prompt, and how many of them were cached."""
    prompt, cached = re.fullmatch(r".* · prompt (\d+) tokens(?:, (\d+) of them cached)?", status).groups()  # type: ignore[union-attr]
    return int(prompt), int(cached or 0)
