"""The playground in headless Chromium, before real servers: it says what their answers and metrics say."""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Playground
from inline_prefills import inline_prefills
from inline_server import inline_server
from live import HttpServer
from playwright.sync_api import Browser
from sizes import sized
from support import eventually

PROMPT = "def add(a, b):\n    return"


@pytest.mark.parametrize("temperature", sized([0.8], [0, 0.8]))
def test_a_completion_is_coloured_by_origin(temperature: float, chromium: Browser, synchronous: HttpServer) -> None:
    body = {"prompt": PROMPT, "max_tokens": 192, "temperature": temperature, "seed": 7}
    status, answer = synchronous.post("/v1/completions", body)
    assert status == 200
    with Playground(chromium, synchronous.url) as playground:
        playground.page.locator("input[value=completions]").check()
        playground.run(PROMPT, max_tokens="192", temperature=str(temperature), seed="7")
        tokens = playground.tokens()
        assert playground.text() == answer["choices"][0]["text"] == "".join(text for text, _ in tokens)
        assert {origin for _, origin in tokens} == {"drafted", "own"}
        usage, reason = answer["usage"], answer["choices"][0]["finish_reason"]
        count, prompt = usage["completion_tokens"], usage["prompt_tokens"]
        assert len(tokens) == count
        cached = f"{prompt - 1} of them cached"  # by the request before
        assert playground.shown("status") == f"{count} tokens · {reason} · seed 7 · prompt {prompt} tokens, {cached}"
        sources = playground.page.locator("#sources li:visible").all_inner_texts()
        assert [line.strip() for line in sources] == [f"{prompt - 1} on the device", "1 computed"]
        assert playground.shown("acceptance").endswith("%") and float(playground.shown("per-step")) > 1
        assert playground.shown("rate") != "–" and playground.shown("first") != "–"
        assert playground.complaints == []
        assert all(request.startswith(synchronous.url) for request in playground.requested)


def test_a_chat_is_answered_turn_by_turn(chromium: Browser, synchronous: HttpServer) -> None:
    """The target's template marks turns: so the page opens."""
    fields = {"max_tokens": 24, "temperature": 0, "seed": 7}
    messages = [{"role": "system", "content": "brief"}]
    with Playground(chromium, synchronous.url) as playground:
        for question in ("x = [1, 2,", "y = [1,"):
            messages.append({"role": "user", "content": question})
            status, answer = synchronous.post("/v1/chat/completions", {"messages": messages, **fields})
            assert status == 200
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            playground.run(question, system="brief", max_tokens="24", temperature="0", seed="7")
            assert f" · prompt {answer['usage']['prompt_tokens']} tokens, " in playground.shown("status")
        said = [message["content"] for message in messages[1:]]
        assert playground.turns() == list(zip(said[::2], said[1::2], strict=True))
        assert len(playground.tokens()) == 48 and {origin for _, origin in playground.tokens()} == {"drafted", "own"}
        assert playground.shown("acceptance").endswith("%") and playground.complaints == []


# -- hand-overs

#: No two begin alike. On a machine that is busy with other things a hand-over may take too long, and another is tried.
PROMPTS = [[3 + (7 * place + i) % 97 for place in range(400)] for i in range(5)]
DETAILED = {"max_tokens": 4, "temperature": 0, "speculation": {"metrics": "detailed"}}
#: Seconds until the target's next status is here at the latest.
LIMIT = 20.0


@pytest.fixture(scope="module")
def handing(llama: Path) -> Iterator[HttpServer]:
    """A server whose target has a prefill worker."""
    logger = logging.getLogger("pilotfish")
    logger.setLevel(logging.INFO)
    with (
        pytest.MonkeyPatch.context() as patch,
        inline_prefills(patch),
        inline_server(llama, prefill_workers=1, prefill_threshold="64") as server,
    ):
        yield server
    logger.setLevel(logging.NOTSET)


def totals(handing: HttpServer) -> dict[str, float]:
    counters = ("handovers_total", "handover_tokens_total", "handover_bytes_total", "handover_hidden_seconds_total")
    return {name: handing.metric(f"pilotfish_{name}") for name in counters}


def settled(handing: HttpServer, handovers: int) -> dict[str, float]:
    """Totals, once so many hand-overs are in them."""

    def told() -> bool:
        there = "pilotfish_handovers_total{" in handing.get("/metrics")[1]
        return there and totals(handing)["handovers_total"] >= handovers

    eventually(told, LIMIT, pause=0.05, told=lambda: handing.log)
    return totals(handing)


def asked_until_whole(handing: HttpServer) -> tuple[list[int], dict[str, Any], list[dict[str, Any]]]:
    """A prompt whose KV was handed over as a whole, its answer, and all hand-overs so far."""
    told: list[dict[str, Any]] = []
    for prompt in PROMPTS:
        status, answer = handing.post("/v1/completions", {"prompt": prompt, **DETAILED})
        assert status == 200
        told += answer["metrics"].get("handovers", [])
        if told and told[-1]["outcome"] == "whole":
            return prompt, answer, told
    raise AssertionError(told)


def test_answers_and_metrics_say_the_same(handing: HttpServer) -> None:
    prompt, first, told = asked_until_whole(handing)
    again = handing.post("/v1/completions", {"prompt": prompt, **DETAILED})[1]
    short = handing.post("/v1/completions", {"prompt": prompt[1:50], **DETAILED})[1]
    whole, facts = told[-1], {"pool": "prefill 0", "transport": "shm", "tokens": 399, "cached": 0}
    assert {name: whole[name] for name in facts} == facts
    assert first["metrics"]["handed_over"] == 399 and first["metrics"]["cached_by_tier"] == {}
    assert whole["computing"] > 0 and whole["transfer"] > 0 and 0 < whole["arriving"] <= whole["seconds"]
    assert again["metrics"]["cached_by_tier"] == {"device": 399}
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert all("handed_over" not in answer["metrics"] for answer in (again, short))
    assert settled(handing, handovers=len(told)) == {
        "handovers_total": len(told),
        "handover_tokens_total": sum(one["tokens"] for one in told),
        "handover_bytes_total": sum(one["size"] for one in told),
        "handover_hidden_seconds_total": pytest.approx(sum(one["hidden"] for one in told)),
    }
    page = handing.get("/metrics")[1]
    assert 'pool="prefill 0",transport="shm"} 1.0' in page
    assert handing.metric("pilotfish_prefill_pool_transport") == handing.metric("pilotfish_prefill_pool_ready") == 1
    assert "prefill 0: segments are read by shm" in handing.log


def test_the_page_shows_what_was_handed_over(chromium: Browser, handing: HttpServer) -> None:
    with Playground(chromium, handing.url) as playground:
        for i in range(5):
            playground.run(f"# {i}\n" + "def add(a, b):\n    return a + b\n" * 12, max_tokens="8", temperature="0")
            if "tokens came from" in (summary := playground.shown("summary")):
                break
        told = re.fullmatch(r".* · prompt (\d+) tokens(?:, (\d+) of them cached)?", playground.shown("status"))
        assert told is not None
        prompt, cached = (int(number or 0) for number in told.groups())
        assert f" {prompt - 1 - cached} tokens came from prefill 0 by shm: " in summary
        sources = [line.strip() for line in playground.page.locator("#sources li:visible").all_inner_texts()]
        assert sources[-2:] == [f"{prompt - 1 - cached} from a prefill worker", "1 computed"]
        assert playground.page.locator("figure .legend li").locator("visible=true").count() == 10
        assert playground.complaints == []
