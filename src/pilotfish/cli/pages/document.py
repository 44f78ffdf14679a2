from pathlib import Path
from xml.etree.ElementTree import Element, tostring

from pilotfish.errors import ParameterError

STYLE = Path(__file__).with_name("page.css")
Child = Element | str


def tag(kind: str, /, *children: Child | None, **attributes: object) -> Element:
    """In an attribute's name a trailing _ is dropped, another _ becomes -; None leaves out an attribute or a child;
    numbers have at most two decimals. Texts and values are escaped when written."""
    named = {key.rstrip("_").replace("_", "-"): _text(value) for key, value in attributes.items() if value is not None}
    element = Element(kind, named)
    for child in children:
        if isinstance(child, Element):
            element.append(child)
        elif child is not None and len(element):
            element[-1].tail = (element[-1].tail or "") + child
        elif child is not None:
            element.text = (element.text or "") + child
    return element


def _text(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


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
    root = tag("html", head, tag("body", body), lang="en")
    return "<!doctype html>\n" + tostring(root, encoding="unicode", method="html") + "\n"


def table(columns: list[str], rows: list[list[str]]) -> Element:
    head = tag("tr", *(tag("th", name, scope="col") for name in columns))
    body = [tag("tr", *(tag("td", cell) for cell in row)) for row in rows]
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body)), class_="scroll")
