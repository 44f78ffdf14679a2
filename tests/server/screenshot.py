"""Writes a picture of the playground: `python tests/server/screenshot.py FILE [--url URL] [--width N] [--dark]`.

Without a URL a stand-in answers, and without `--prompt` the prompt is the page's own.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path

from browser import Playground, browser
from stand_in import HANDED, StandIn, served, story


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a picture of the playground after one answer.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--url", help="a server; default: a stand-in")
    parser.add_argument("--prompt", help="default: the page's own")
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--dark", action="store_true")
    options = parser.parse_args()
    stand_in = StandIn()
    stand_in.parts, stand_in.pause = story([HANDED]), 0.02
    with nullcontext(options.url) if options.url else served(stand_in.app()) as url, browser() as chromium:
        take(Playground(chromium, url, **look(options)), options)


def look(options: argparse.Namespace) -> dict[str, object]:
    viewport = {"width": options.width, "height": 800}
    return {"viewport": viewport, "color_scheme": "dark" if options.dark else "light", "device_scale_factor": 1.5}


def take(playground: Playground, options: argparse.Namespace) -> None:
    with playground:
        if options.prompt is not None:
            playground.page.fill("#prompt", options.prompt)
        playground.page.click("#run")
        playground.wait()
        playground.page.evaluate("document.activeElement.blur(); document.getElementById('prompt').scrollTop = 0")
        playground.page.screenshot(path=options.file, full_page=True)


if __name__ == "__main__":
    main()
