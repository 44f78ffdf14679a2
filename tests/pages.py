"""Tables of the documentation, for tests that try their lines."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def section(page: str, heading: str) -> list[str]:
    """Lines below a heading of a page in docs/, up to the next one of its level."""
    text = (DOCS / page).read_text()
    return text.split(f"\n## {heading}\n")[1].split("\n## ")[0].splitlines()


def table(page: str, heading: str) -> list[list[str]]:
    """Rows of the table below a heading, without the first two lines of it."""
    lines = [line for line in section(page, heading) if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines[2:]]


def items(page: str, heading: str) -> list[str]:
    """Items of the list below a heading, a line each."""
    return [line.removeprefix("- ") for line in section(page, heading) if line.startswith("- ")]


def codes(cell: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", cell)
