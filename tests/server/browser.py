"""Drives the playground in headless Chromium."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
TIMEOUT = 30_000  # milliseconds until what is waited for counts as missing


def executable() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


def needs_browser() -> None:
    """Skips where no browser is installed, unless PILOTFISH_REQUIRE_BROWSER says that one must be."""
    if executable() is None:
        reason = f"no browser is installed: none of {', '.join(NAMES)} is on the path"
        if os.environ.get("PILOTFISH_REQUIRE_BROWSER"):
            pytest.fail(reason)
        pytest.skip(reason)


@contextmanager
def browser() -> Iterator[Browser]:
    """Headless Chromium with a new profile of its own, gone afterwards."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=executable(), args=FLAGS)
        try:
            yield chromium
        finally:
            chromium.close()


class Playground:
    """The page, opened at `url`, and what it asked for and complained of."""

    def __init__(self, chromium: Browser, url: str, **context: Any) -> None:
        """`context`: options of playwright's `Browser.new_context`, as in viewport or color_scheme."""
        self.url, self.context = url, chromium.new_context(**context)
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(TIMEOUT)
        self.requested: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requested.append(request.url))
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.open()

    def open(self) -> None:
        """As in a new tab."""
        if self.page.url.startswith(self.url):
            self.page.evaluate("sessionStorage.clear()")
        self.page.goto("about:blank")  # ends what is under way
        self.requested.clear()
        self.complaints.clear()
        self.page.goto(self.url)
        expect(self.page.locator("#status")).not_to_be_empty(timeout=TIMEOUT)

    def __enter__(self) -> Playground:
        return self

    def __exit__(self, *exc: object) -> None:
        self.context.close()

    def start(self, prompt: str, **fields: str) -> None:
        """Fills the prompt and fields by id (`max_tokens="8"`), and runs."""
        for name, value in fields.items():
            self.page.fill(f"#{name.replace('_', '-')}", value)
        self.page.fill("#prompt", prompt)
        self.page.click("#run")

    def wait(self) -> None:
        """Until the answer has ended, well or not."""
        expect(self.page.locator("#run")).to_have_attribute("aria-disabled", "false", timeout=TIMEOUT)

    def run(self, prompt: str, **fields: str) -> None:
        self.start(prompt, **fields)
        self.wait()

    def text(self) -> str:
        """The answer's exact text."""
        return str(self.page.locator("#output").evaluate("element => element.textContent"))

    def tokens(self) -> list[tuple[str, str]]:
        """(text, origin) of each of the answer's tokens; origin is drafted or own."""
        script = "all => all.map(one => [one.textContent, one.classList.contains('drafted') ? 'drafted' : 'own'])"
        return [(text, origin) for text, origin in self.page.locator("#output .token").evaluate_all(script)]

    def turns(self) -> list[tuple[str, str]]:
        """Question and answer of each turn of a chat, exactly."""
        script = "all => all.map(one => [one.querySelector('p').textContent, one.querySelector('div').textContent])"
        return [(question, said) for question, said in self.page.locator("#output section").evaluate_all(script)]

    def shown(self, name: str) -> str:
        """The visible text of an element, by id: status, error, acceptance, summary and so on."""
        return self.page.locator(f"#{name}").inner_text()

    def background(self) -> str:
        return str(self.page.evaluate("getComputedStyle(document.body).backgroundColor"))

    def overflow(self) -> int:
        """CSS pixels by which the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))
