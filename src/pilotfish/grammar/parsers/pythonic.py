"""Calls as Python writes them: [name(key=value, …), …]."""

import json
import re
from collections.abc import Callable

from pilotfish.grammar.parsers.call_parser import CallParser
from pilotfish.grammar.parsers.python_text import read_string, read_word
from pilotfish.grammar.parsers.reader import Reading

START, END = "<|python_start|>", "<|python_end|>"
#: Depth of nested values.
MAX_DEPTH = 64
_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"\w*")

#: Reads an item after its separator.
Item = Callable[[str], Reading[bool]]


class PythonicParser(CallParser):
    _depth = 0

    def _marked(self, mark: str) -> Reading[None]:
        self._inside = False
        if mark == END:
            self._reader.forget()
        elif (yield from self._skip_space()) == "[":
            before = self._calls
            yield from self._bare_calls()
            self._inside = self._calls > before
        else:
            self._give_up()

    def _bare_calls(self) -> Reading[None]:
        before = self._calls
        self._reader.take(1)
        if (yield from self._several("]", self._call)) and self._calls > before:
            self._reader.forget()
        else:
            yield from self._leave(before)

    def _call(self, separator: str) -> Reading[bool]:
        del separator  # calls are pieces of their own
        yield from self._skip_space()
        name = yield from self._reader.span(_NAME)
        if name not in self._names or (yield from self._skip_space()) != "(":
            return False
        self._reader.take(1)
        self._begin(name)
        if (yield from self._skip_space()) == "*":
            return (yield from self._mapping())
        return (yield from self._bracketed(")", "{}", self._keyword))

    def _mapping(self) -> Reading[bool]:
        if not (yield from self._reader.mark(("**",))):
            return False
        self._reader.take(2)
        whole = (yield from self._skip_space()) == "{" and (yield from self._value(""))
        if not whole or (yield from self._skip_space()) != ")":
            return False
        self._reader.take(1)
        self._reader.forget()
        return True

    def _keyword(self, separator: str) -> Reading[bool]:
        key = yield from self._reader.span(_KEY)
        if not key or (yield from self._skip_space()) != "=":
            return False
        self._reader.take(1)
        return (yield from self._value(f"{separator}{json.dumps(key, ensure_ascii=False)}: "))

    def _entry(self, separator: str) -> Reading[bool]:
        sign = yield from self._skip_space()
        if not sign or sign not in "'\"":
            return False
        self._argue(separator)
        if not (yield from read_string(self._reader, self._argue)) or (yield from self._skip_space()) != ":":
            return False
        self._reader.take(1)
        return (yield from self._value(": "))

    def _value(self, before: str) -> Reading[bool]:
        sign = yield from self._skip_space()
        if sign and sign in "'\"":
            self._argue(before)
            return (yield from read_string(self._reader, self._argue))
        if sign and sign in "[({" and self._depth < MAX_DEPTH:
            self._argue(before)
            self._reader.take(1)
            return (yield from self._nested(sign))
        word = yield from read_word(self._reader)
        if word:
            self._argue(before + word)
        return bool(word)

    def _nested(self, sign: str) -> Reading[bool]:
        self._depth += 1
        closing, brackets, item = {
            "[": ("]", "[]", self._value),
            "(": (")", "[]", self._value),
            "{": ("}", "{}", self._entry),
        }[sign]
        whole = yield from self._bracketed(closing, brackets, item)
        self._depth -= 1
        return whole

    def _bracketed(self, closing: str, brackets: str, item: Item) -> Reading[bool]:
        self._argue(brackets[0])
        whole = yield from self._several(closing, item)
        if whole:
            self._argue(brackets[1])
        return whole

    def _several(self, closing: str, item: Item) -> Reading[bool]:
        separator = ""
        while (sign := (yield from self._skip_space())) != closing:
            if not (yield from item(separator)):
                return False
            sign, separator = (yield from self._skip_space()), ", "
            if sign == ",":
                self._reader.take(1)
            elif sign != closing:
                return False
        self._reader.take(1)
        return True
