"""Foreign text is made safe to print: characters that control a terminal or break lines are escaped as in Python.
Messages become one line; a model's output keeps its lines."""

import logging
import re
import reprlib

#: Control characters (C0 but tab and newline, DEL, C1), separators of lines, marks that turn the direction of text,
#: half surrogate pairs, invisible tags.
_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)

_repr = reprlib.Repr()  # neither deep nor long, whatever the value
_repr.maxstring = _repr.maxother = _repr.maxlong = 60
_repr.maxlevel = 2


def printable(text: str) -> str:
    """Escapes every character that does not show, newlines too."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escaped(c) for c in text)


def one_line(text: str) -> str:
    return text if text.isprintable() else printable(" ".join(text.split()))


def printable_output(text: str) -> str:
    """Keeps lines and tabs; escapes characters that control a terminal."""
    return _COMMANDS.sub(lambda match: _escaped(match[0]), text)


def short(value: object) -> str:
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
