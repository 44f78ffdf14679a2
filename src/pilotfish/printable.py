"""Text from elsewhere, made safe to print: what a terminal could take for a command, or a reader for another line, is
escaped as Python would write it.

A text for people is one line (`printable`, `one_line`); a model's output keeps its lines (`printable_output`).
"""

from __future__ import annotations

import logging
import re

#: Control characters (C0 but tab and newline, DEL, C1), what separates lines or turns their direction, half surrogate
#: pairs, tags that nobody sees.
_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """One line: every character that does not show is escaped, newlines too."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def one_line(text: str) -> str:
    """The same, with white space of any kind as single spaces."""
    return text if text.isprintable() else printable(" ".join(text.split()))


def printable_output(text: str) -> str:
    """Lines, tabs and whatever writing needs stay; what a terminal obeys is escaped."""
    return _COMMANDS.sub(lambda match: _escaped(match[0]), text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


class OneLineFormatter(logging.Formatter):
    """Whatever a message holds stays within its line; lines of a traceback begin with `  | `."""

    def format(self, record: logging.LogRecord) -> str:
        record.message = record.getMessage()
        line = printable(self.formatMessage(record))
        if not record.exc_info:
            return line
        trace = self.formatException(record.exc_info).split("\n")
        return "\n".join([line, *(f"  | {printable(part)}" for part in trace)])
