"""JSON as it comes, split by brackets and quotes alone; its reader checks validity."""

import re

from pilotfish.grammar.parsers.reader import HEX, Reader, Reading, Sink

#: What a text holds: whole escapes are taken with the rest, for speed; `read_string` takes one that is cut.
_IN_TEXT = r'[^"\\]*+(?:\\.[^"\\]*+)*+'
_PLAIN = re.compile(_IN_TEXT, re.DOTALL)
#: Between brackets, with whole texts. A `<` outside of them is never JSON: a mark of the model may begin there.
_BETWEEN = re.compile(rf'(?:[^"{{}}\[\]<]++|"{_IN_TEXT}")*+', re.DOTALL)
_UNESCAPED = re.compile(r'[^"\\]*')
_WORD = re.compile(r'[^\s"{}\[\]<,:;]*')
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "/": "/"}


def read_value(reader: Reader, sink: Sink) -> Reading[bool]:
    """Gives whether the value was whole."""
    first = yield from reader.peek()
    if first == '"':
        return (yield from read_string(reader, sink))
    if first and first in "{[":
        return (yield from _read_nested(reader, sink))
    word = yield from reader.span(_WORD)
    if known := bool(_SCALAR.fullmatch(word)):
        sink(word)
    return known


def _read_nested(reader: Reader, sink: Sink) -> Reading[bool]:
    depth = 0
    while True:
        yield from reader.run(_BETWEEN, sink)
        sign = yield from reader.peek()
        if sign == '"':
            yield from read_string(reader, sink)
            continue
        if not sign or sign == "<":
            return False
        depth += 1 if sign in "{[" else -1
        sink(reader.take(1))
        if not depth:
            return True


def read_string(reader: Reader, sink: Sink) -> Reading[bool]:
    """Keeps quotes and escapes; gives whether the text ended."""
    sink(reader.take(1))
    while True:
        yield from reader.run(_PLAIN, sink)
        sign = yield from reader.peek()
        if sign:
            sink(reader.take(1))
        if sign != "\\":
            return bool(sign)
        if (yield from reader.peek()):
            sink(reader.take(1))


def read_decoded(reader: Reader, sink: Sink) -> Reading[bool]:
    """Decodes the text behind its first quote; gives whether it ended."""
    while True:
        yield from reader.run(_UNESCAPED, sink)
        sign = yield from reader.peek()
        if sign != "\\":
            if sign:
                reader.take(1)
            return bool(sign)
        yield from _read_escape(reader, sink)


def _read_escape(reader: Reader, sink: Sink) -> Reading[None]:
    """Reads one escape, or two that make one character. An invalid one is passed on as it is written."""
    written = reader.take(1)
    sign = yield from reader.peek()
    if sign != "u":
        written += reader.take(len(sign))
        sink(_ESCAPES.get(sign, written))
        return
    unit, written = yield from _read_unit(reader, written)
    while 0xD800 <= unit < 0xDC00 and (yield from reader.mark(("\\u",))):
        low, rest = yield from _read_unit(reader, reader.take(1))
        if 0xDC00 <= low < 0xE000:
            sink(chr(0x10000 + ((unit - 0xD800) << 10) + low - 0xDC00))
            return
        sink("\ufffd")
        unit, written = low, rest
    sink(written if unit < 0 else "\ufffd" if 0xD800 <= unit < 0xE000 else chr(unit))


def _read_unit(reader: Reader, written: str) -> Reading[tuple[int, str]]:
    written += reader.take(1)
    digits = yield from reader.digits(HEX, 4)
    return int(digits, 16) if len(digits) == 4 else -1, written + digits
