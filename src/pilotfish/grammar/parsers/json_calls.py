"""Calls as JSON objects {"name": …, "arguments": {…}} with members in any order; Mistral writes a list of them behind
one [TOOL_CALLS], or a name and its arguments behind each."""

import re
from dataclasses import dataclass, field

import msgspec

from pilotfish.grammar.parsers.call_parser import CallParser
from pilotfish.grammar.parsers.json_text import read_decoded, read_string, read_value
from pilotfish.grammar.parsers.reader import Reading

ARGUMENTS = ("arguments", "parameters")
#: Members of a call beside its name. An object without a mark that has others is no call.
_KNOWN = {*ARGUMENTS, "type", "id"}
_BETWEEN = re.compile(r"[\s,;]*")
#: Mistral's marks.
CALLS, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[\w.:-]*")


@dataclass
class _Call:
    named_only: bool
    name: str | None = None
    begun: bool = False
    has_arguments: bool = False
    early: list[str] = field(default_factory=list)  # arguments before the name


class JsonCallParser(CallParser):
    """Objects, one or more or in a list. A bare one, as Llama writes it, must name a tool."""

    def _bare_calls(self) -> Reading[None]:
        return self._calls_until_end(named_only=True)

    def _marked(self, mark: str) -> Reading[None]:
        if mark in self._end:
            self._inside = False
            self._reader.forget()
        else:
            yield from self._calls_until_end()

    def _calls_until_end(self, *, named_only: bool = False) -> Reading[None]:
        before, listed = self._calls, False
        while True:
            yield from self._reader.span(_BETWEEN)
            sign = yield from self._reader.peek()
            if sign == "{":
                if not (yield from self._call(named_only)):
                    break
            elif sign == "[" and not listed and self._calls == before:
                listed = bool(self._reader.take(1))
            elif sign == "]" and listed and self._calls > before:
                self._reader.take(1)
                self._reader.forget()
                listed = False
            else:
                break
        self._inside = self._calls > before
        if self._inside and (mark := (yield from self._reader.mark(self._end))):
            self._reader.take(len(mark))
            yield from self._marked(mark)
        else:
            yield from self._leave(before)

    def _call(self, named_only: bool) -> Reading[bool]:
        call = _Call(named_only)
        self._reader.take(1)
        sign = yield from self._skip_space()
        while sign == '"':
            if not (yield from self._member(call)):
                return False
            sign = yield from self._skip_space()
            if sign == ",":
                self._reader.take(1)
                sign = yield from self._skip_space()
        return (yield from self._end_call(call, closed=sign == "}"))

    def _member(self, call: _Call) -> Reading[bool]:
        key = yield from self._text()
        if key is None or (yield from self._skip_space()) != ":":
            return False
        self._reader.take(1)
        sign = yield from self._skip_space()
        if key == "name" and call.name is None:
            call.name = (yield from self._text()) if sign == '"' else None
            known = bool(call.name) and (not call.named_only or call.name in self._names)
        elif key in ARGUMENTS and not call.has_arguments:
            known = yield from self._arguments(call, sign)
        else:
            whole = yield from read_value(self._reader, _ignore)
            known = whole and (not call.named_only or key in _KNOWN)
        if known and not call.named_only:
            self._begin_named(call)
        return known

    def _arguments(self, call: _Call, sign: str) -> Reading[bool]:
        """Whether a value was whole: an object, the JSON text of one, or null for no arguments."""
        call.has_arguments = True
        self._begin_named(call)
        sink = self._argue if call.begun else call.early.append
        if sign == '"':
            self._reader.take(1)
            if (yield from self._reader.peek()) == '"':
                sink("{}")
            return (yield from read_decoded(self._reader, sink))
        if sign != "n":
            return (yield from read_value(self._reader, sink))
        if null := (yield from read_value(self._reader, _ignore)):
            sink("{}")
        return null

    def _begin_named(self, call: _Call) -> None:
        if call.name and not call.begun:
            call.begun = True
            self._begin(call.name)
            if call.early:
                self._argue("".join(call.early))

    def _end_call(self, call: _Call, *, closed: bool) -> Reading[bool]:
        if closed:
            self._reader.take(1)
            self._begin_named(call)
        if not call.begun:
            return False
        if not call.has_arguments and (closed or (yield from self._reader.mark(self._end))):
            self._argue("{}")
        if closed:
            self._reader.forget()
        return closed

    def _text(self) -> Reading[str | None]:
        written: list[str] = []
        yield from read_string(self._reader, written.append)
        try:
            return msgspec.json.decode("".join(written), type=str)
        except msgspec.DecodeError:
            return None


def _ignore(_: str) -> None: ...


class MistralParser(JsonCallParser):
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
            if (yield from self._skip_space()) == "{":
                yield from read_value(self._reader, self._argue)
            elif (yield from self._reader.mark((CALLS,))):
                self._argue("{}")
        self._give_up()

    def _arguments_follow(self) -> Reading[bool]:
        mark = yield from self._reader.mark((ID, ARGS))
        if mark == ID:
            self._reader.take(len(mark))
            yield from self._reader.span(_NAME)
            mark = yield from self._reader.mark((ARGS,))
        self._reader.take(len(mark))
        return bool(mark) or (yield from self._skip_space()) == "{"
