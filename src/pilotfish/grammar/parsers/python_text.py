import json
import re

from pilotfish.grammar.parsers.reader import HEX, Reader, Reading, Sink

_PLAIN = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}
_WORD = re.compile(r"[\w.+-]*")
_NUMBER = re.compile(r"([+-]?)([0-9]*)(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "\n": ""} | {
    sign: sign for sign in "'\"\\/"
}
_DIGITS = {"x": 2, "u": 4, "U": 8}
_OCTAL = frozenset("01234567")


def read_word(reader: Reader) -> Reading[str]:
    """A number or constant as JSON; "" for another word."""
    word = yield from reader.span(_WORD)
    return _WORDS.get(word) or _number(word.replace("_", ""))


def _number(word: str) -> str:
    match = _NUMBER.fullmatch(word)
    if match is None or not any(sign.isdigit() for sign in (match[2] + (match[3] or ""))):
        return ""
    sign, whole, fraction, exponent = match.groups(default="")
    fraction = ".0" if fraction == "." else fraction
    return f"{sign.strip('+')}{whole.lstrip('0') or '0'}{fraction}{exponent}"


def read_string(reader: Reader, sink: Sink) -> Reading[bool]:
    """Reads a text in one quote or three, with JSON's quotes and escapes as output; gives whether it ended."""
    quote = reader.take(1)
    if more := (yield from reader.mark((quote * 2,))):
        reader.take(len(more))
    end = quote + more
    sink('"')
    while True:
        yield from reader.run(_PLAIN[quote], lambda text: sink(_escaped(text)))
        sign = yield from reader.peek()
        if not sign:
            return False
        if sign == "\\":
            yield from _read_escape(reader, sink)
        elif (yield from reader.mark((end,))):
            reader.take(len(end))
            sink('"')
            return True
        else:
            sink(_escaped(reader.take(1)))


def _read_escape(reader: Reader, sink: Sink) -> Reading[None]:
    written = reader.take(1)
    sign = yield from reader.peek()
    if sign in _OCTAL:
        number = yield from reader.digits(_OCTAL, 3)
        sink(_escaped(chr(int(number, 8))))
        return
    written += reader.take(len(sign))
    if sign not in _DIGITS:
        sink(_escaped(_ESCAPES.get(sign, written)))
        return
    number = yield from reader.digits(HEX, _DIGITS[sign])
    if len(number) < _DIGITS[sign] or int(number, 16) > 0x10FFFF:
        sink(_escaped(written + number))
    elif sign == "U" and int(number, 16) > 0xFFFF:
        sink(_escaped(chr(int(number, 16))))
    else:
        sink(f"\\u{number[-4:]:0>4}")  # as JSON writes it too, half of a pair included


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
