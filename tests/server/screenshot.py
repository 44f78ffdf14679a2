"""Writes the documentation's pictures of the playground: `python tests/server/screenshot.py docs/playground.png`; of a
chat with a server that is there, `python tests/server/screenshot.py docs/chat.png http://127.0.0.1:8000/`."""

import sys
from collections.abc import Callable

from browser import Playground, browser
from stand_in import HANDED, StandIn, served, story

QUESTIONS = ("Why is the sky blue?", "Tell it to a child, in two sentences.")


def picture(path: str, url: str, act: Callable[[Playground], None]) -> None:
    look = {"viewport": {"width": 1280, "height": 800}, "device_scale_factor": 1.5}
    with browser() as chromium, Playground(chromium, url, **look) as playground:
        act(playground)
        playground.page.evaluate("document.activeElement.blur(); document.getElementById('prompt').scrollTop = 0")
        playground.page.screenshot(path=path, full_page=True)


def complete(playground: Playground) -> None:
    playground.page.click("#run")
    playground.wait()


def chat(playground: Playground) -> None:
    for question in QUESTIONS:
        playground.run(question, max_tokens="120", temperature="0", seed="1")


def main(path: str, url: str = "") -> None:
    stand_in = StandIn()
    stand_in.parts, stand_in.pause = story([HANDED]), 0.02
    with served(stand_in.app()) as double:
        picture(path, url or double, chat if url else complete)


if __name__ == "__main__":
    main(*sys.argv[1:])
