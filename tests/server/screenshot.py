"""Writes the documentation's picture of the playground: `python tests/server/screenshot.py docs/playground.png`."""

import sys

from browser import Playground, browser
from stand_in import HANDED, StandIn, served, story


def main(path: str) -> None:
    stand_in = StandIn()
    stand_in.parts, stand_in.pause = story([HANDED]), 0.02
    look = {"viewport": {"width": 1280, "height": 800}, "device_scale_factor": 1.5}
    with served(stand_in.app()) as url, browser() as chromium, Playground(chromium, url, **look) as playground:
        playground.page.click("#run")
        playground.wait()
        playground.page.evaluate("document.activeElement.blur(); document.getElementById('prompt').scrollTop = 0")
        playground.page.screenshot(path=path, full_page=True)


if __name__ == "__main__":
    main(sys.argv[1])
