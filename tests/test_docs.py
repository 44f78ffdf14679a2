"""The documentation hangs together: the index has every page, and links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
INDEX = DOCS / "README.md"
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted(DOCS.glob("*.md"))]
NAMING_PAGES = ("src/pilotfish", "deploy", "observability", "examples")


def links(page: Path) -> list[str]:
    """Relative links of a page outside code blocks, as they are written."""
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if "://" not in link]


def anchors(page: Path) -> set[str]:
    """Names that GitHub gives to the headings of a page."""
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    found = set[str]()
    for heading in re.findall(r"^#+ (.*)$", prose, re.MULTILINE):
        name = slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        count = 0
        while name in found:
            count += 1
            name = f"{slug}-{count}"
        found.add(name)
    return found


def leads_nowhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    to = (page.parent / path).resolve() if path else page
    return not to.exists() or (bool(anchor) and anchor not in anchors(to))


def test_the_index_has_every_page_once() -> None:
    pages = sorted(page.name for page in DOCS.glob("*.md") if page != INDEX)
    assert sorted(link for link in links(INDEX) if "/" not in link) == pages


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert [link for link in links(page) if leads_nowhere(page, link)] == []


def test_pages_that_files_name_exist() -> None:
    files = [file for folder in NAMING_PAGES for file in (ROOT / folder).rglob("*") if file.is_file()]
    texts = [file.read_text(errors="ignore") for file in files if file.suffix not in (".pyc", ".so", ".safetensors")]
    named = {name for text in texts for name in re.findall(r"(?<![\w/])docs/[\w-]+\.md", text)}
    assert sorted(name for name in named if not (ROOT / name).exists()) == []
