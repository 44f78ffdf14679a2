from __future__ import annotations

from xml.etree.ElementTree import Element, tostring

Child = Element | str


def tag(kind: str, /, *children: Child | None, **attributes: object) -> Element:
    """In an attribute's name a trailing _ is dropped, another _ becomes -; None leaves out an attribute or a child;
    numbers have at most two decimals. Texts and values are escaped when written."""
    named = {key.rstrip("_").replace("_", "-"): _text(value) for key, value in attributes.items() if value is not None}
    element = Element(kind, named)
    last: Element | None = None
    for child in children:
        if isinstance(child, Element):
            element.append(child)
            last = child
        elif child is not None and last is None:
            element.text = (element.text or "") + child
        elif child is not None and last is not None:
            last.tail = (last.tail or "") + child
    return element


def document(root: Element) -> str:
    return "<!doctype html>\n" + tostring(root, encoding="unicode", method="html") + "\n"


def _text(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
