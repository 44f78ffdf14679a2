"""Mistral's calls: a list of objects behind [TOOL_CALLS], or a name and its arguments behind each of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pilotfish.grammar.parsers.json_calls import JsonCallParser
from pilotfish.grammar.parsers.json_text import read_value
from pilotfish.grammar.parsers.reader import Reading
from pilotfish.grammar.parsers.tools import Tool

CALLS, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w.:-]*")


class MistralParser(JsonCallParser):
    def __init__(self, tools: Sequence[Tool]) -> None:
        super().__init__(tools, CALLS)

    def _marked(self, mark: str) -> Reading[None]:
        sign = yield from self._skip_space()
        if sign and sign in "[{":
            yield from super()._marked(mark)
        else:
            yield from self._named()

    def _named(self) -> Reading[None]:
        name = yield from self._reader.span(_NAME)
        if name and (yield from self._arguments_follow()):
            self._begin(name)
            yield from self._read_arguments()
        self._give_up()

    def _read_arguments(self) -> Reading[None]:
        if (yield from self._skip_space()) == "{":
            yield from read_value(self._reader, self._argue)
        elif (yield from self._reader.mark((CALLS,))):
            self._argue("{}")

    def _arguments_follow(self) -> Reading[bool]:
        mark = yield from self._reader.mark((ID, ARGS))
        if mark == ID:
            self._reader.take(len(mark))
            yield from self._reader.span(_NAME)
            mark = yield from self._reader.mark((ARGS,))
        self._reader.take(len(mark))
        return bool(mark) or (yield from self._skip_space()) == "{"
