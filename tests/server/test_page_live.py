"""The playground in headless Chromium, before a real server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Playground, browser, needs_browser
from live import HttpServer
from playwright.sync_api import Browser

PROMPT = "def add(a, b):\n    return"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    needs_browser()
    with browser() as chromium:
        yield chromium


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_a_completion_streams_in_coloured_by_origin(
    temperature: float, chromium: Browser, synchronous: HttpServer
) -> None:
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
