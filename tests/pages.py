"""Tables of the documentation, for tests that try their lines."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def table(page: str, heading: str) -> list[list[str]]:
    """Rows of the table below a heading of a page in docs/, without the first two lines of it."""
    text = (DOCS / page).read_text()
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in lines[2:]]


def codes(cell: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", cell)
