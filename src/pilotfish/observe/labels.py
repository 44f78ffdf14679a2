"""Labels of metrics, each with a bounded number of values whatever clients send."""

from __future__ import annotations

import re
from typing import Literal, TypeAlias

from pilotfish.errors import ParameterError

Mode: TypeAlias = Literal["off", "sync", "async"]
#: What a request asked for. An output that is held to a form is another kind.
Output: TypeAlias = Literal["completion", "chat"]
FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]

FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length", "abort", "error")
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
#: Distinct tags of one server; requests with further ones count as OTHER.
MAX_TAGS = 32
NO_TAG = "none"
OTHER = "other"

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,63}")


def checked_tag(value: object, field: str = "metadata.tag") -> str:
    """The tag of a request; `field` is where it came from, for the error's message."""
    if isinstance(value, str) and _TAG.fullmatch(value):
        return value
    shown = value[:80] if isinstance(value, str) else value
    raise ParameterError(field, shown, "1 to 64 letters, digits and _ . : / -, a letter or digit first")


def status_class(status: int) -> str:
    """`2xx` of 200, as vLLM labels its http_requests_total."""
    return f"{status // 100}xx"


class Tags:
    """The first MAX_TAGS tags are labels of their own."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def label(self, tag: str | None) -> str:
        if tag is None:
            return NO_TAG
        if tag not in self._known and len(self._known) < MAX_TAGS:
            self._known.add(tag)
        return tag if tag in self._known else OTHER
