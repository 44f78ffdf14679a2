"""Parts of a request that are left out because they change no answer: metadata, hints, beta fields, tools that run
elsewhere. A header tells the client, the log tells the operator once for each name."""

import logging
import re
from collections.abc import Sequence
from typing import Any

from pilotfish.server.http_errors import HttpError, bad

HEADER = "x-pilotfish-ignored"
#: Names told for one request, and in all by the log: clients make them up.
MOST, MOST_LOGGED = 16, 1000
MORE = "and-more"  # stands for further names
#: Names that some API may have; others are unlikely to be a client's habit.
NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
#: Characters of a name in the header and the log.
LONGEST = 64
_OTHER = re.compile(r"[^\w.\[\]-]", re.ASCII)
_INDEX = re.compile(r"\[\d+\]")
_logged: set[str] = set()
logger = logging.getLogger(__name__)


class Ignored:
    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self._names: dict[str, None] = {}

    def leave_out(self, refusal: HttpError, name: str | None = None) -> None:
        if self.strict:
            raise refusal
        self.tell(name or refusal.param or "", "nothing here uses it; --strict refuses it")

    def tell(self, field: str, why: str) -> None:
        name = _told(field)
        if not self.is_told(field):
            self._names[name] = None
        if name not in _logged and len(_logged) < MOST_LOGGED:
            _logged.add(name)
            logger.info("%s is left out of requests: %s", name, why)

    def offered(self, tools: list[Any], kinds: Sequence[str], path: str = "tools") -> list[Any]:
        """None in place of each tool of other `kinds`, of which no model can be told."""
        return [self._offered(tool, kinds, f"{path}[{i}]") for i, tool in enumerate(tools)]

    def _offered(self, tool: Any, kinds: Sequence[str], path: str) -> Any:
        if tool is None:
            raise bad(path, tool, "an object")
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            allowed = " or ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))
            self.leave_out(bad(f"{path}.type", kind, allowed), kind_of("tools", kind))
            return None
        if kind == "namespace" and isinstance(tool.get("tools"), list):
            return {**tool, "tools": self.offered(tool["tools"], kinds, f"{path}.tools")}
        return tool

    def is_told(self, field: str) -> bool:
        if len(self._names) >= MOST:
            self._names[MORE] = None
            return True
        return _told(field) in self._names

    @property
    def header(self) -> str:
        return ", ".join(self._names)


def _told(field: str) -> str:
    return _OTHER.sub("", _INDEX.sub("[]", field))[:LONGEST]


def kind_of(field: str, kind: str) -> str:
    return f"{field}[{kind}]" if NAME.fullmatch(kind) else f"{field}[]"
