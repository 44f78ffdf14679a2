"""Text from elsewhere, made safe to print. Characters that a terminal could take for a command, or a reader for another
line, are escaped as Python would write them. Messages become one line; a model's output keeps its lines."""

from __future__ import annotations

import logging
import re
import reprlib

#: Control characters (C0 but tab and newline, DEL, C1), what separates lines or turns their direction, half surrogate
#: pairs, tags that nobody sees.
_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)

_repr = reprlib.Repr()  # neither deep nor long, whatever the value
_repr.maxstring = _repr.maxother = _repr.maxlong = 60
_repr.maxlevel = 2


def printable(text: str) -> str:
    """Text on one line: escapes every character that does not show, newlines too."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def one_line(text: str) -> str:
    """Text on one line, with white space of any kind as single spaces."""
    return text if text.isprintable() else printable(" ".join(text.split()))


def printable_output(text: str) -> str:
    """Text that keeps its lines and tabs: escapes what a terminal obeys."""
    return _COMMANDS.sub(lambda match: _escaped(match[0]), text)


def short(value: object) -> str:
    """A value, shortened for a message."""
    return _repr.repr(value)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


class OneLineFormatter(logging.Formatter):
    """Keeps a message on one line; lines of a traceback begin with `  | `."""

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        line = printable(self.formatMessage(record))
        if not record.exc_info:
            return line
        trace = self.formatException(record.exc_info).split("\n")
        return "\n".join([line, *(f"  | {printable(part)}" for part in trace)])
