from __future__ import annotations

from pathlib import Path
from xml.etree.ElementTree import Element

from pilotfish.cli.pages.markup import document, tag
from pilotfish.errors import ParameterError

STYLE = Path(__file__).with_name("page.css")


def write_file(text: str, path: Path, option: str = "html") -> None:
    """ParameterError, naming `option`, where the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ParameterError(option, str(path), f"a file that can be written ({error.strerror})") from error


def whole_page(title: str, body: Element) -> str:
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", f"Pilotfish: {title}"),
        tag("style", STYLE.read_text("utf-8")),
    )
    return document(tag("html", head, tag("body", body), lang="en"))


def table(columns: list[str], rows: list[list[str]]) -> Element:
    head = tag("tr", *(tag("th", name, scope="col") for name in columns))
    body = [tag("tr", *(tag("td", cell) for cell in row)) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="scroll")
