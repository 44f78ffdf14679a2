"""What a terminal could take for a command never reaches it raw, and what writing needs stays."""

import logging
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.errors import EngineError, ModelError, ParameterError, PilotfishError
from pilotfish.printable import OneLineFormatter, one_line, printable, printable_output

#: Moves the cursor, rings, names the window, clears, turns the direction, ends the line; half a surrogate pair.
COMMANDS = "\x1b[2J \x07 \x1b]0;owned\x07 \r \x08 \x7f \x9b31m \x85 \u202e \u2066 \u2028 \u200f \ud800 \U000e0041"
any_text = st.text() | st.just(COMMANDS) | st.text(st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp"]))


@given(any_text)
def test_a_line_shows_all_and_obeys_nothing(text: str) -> None:
    for safe in (printable(text), one_line(text)):
        assert safe.isprintable()
        safe.encode()
    assert printable(printable(text)) == printable(text)  # twice is no harm
    assert not text.isprintable() or printable(text) == one_line(text) == text


@given(any_text)
def test_output_keeps_its_lines_and_nothing_that_is_obeyed(text: str) -> None:
    safe = printable_output(text)
    safe.encode()
    assert not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 for c in safe)
    assert not set(safe) & set("\u202a\u202b\u202d\u202e\u2066\u2067\u2068\u2069\u200e\u200f\u2028\u2029\ufeff")
    assert safe.count("\n") == text.count("\n") and printable_output(safe) == safe


def test_what_scripts_need_stays() -> None:
    text = "if x:\n\treturn 'naïve\u00a0日本語 👩\u200d💻 ❤\ufe0f क\u094dष می\u200cخواهم'"
    assert printable_output(text) == text


def test_escapes_are_pythons() -> None:
    assert printable("a\x1b[31m\n\u202e\ud800") == r"a\x1b[31m\n\u202e\ud800"
    assert printable_output("a\x1b[31m\n\u202e\ud800") == "a\\x1b[31m\n\\u202e\\ud800"
    assert one_line(" a\r\n\t b\x1b ") == r"a b\x1b"


@pytest.mark.parametrize(
    "error",
    [
        PilotfishError(COMMANDS),
        EngineError(f"step failed: {COMMANDS}"),
        ModelError(f"architectures: {COMMANDS}\nsecond line"),
        ParameterError("field", "value", COMMANDS),
        ParameterError.described("field", COMMANDS),
    ],
)
def test_errors_are_one_line(error: PilotfishError) -> None:
    """A traceback prints str(error) as it is."""
    assert str(error).isprintable() and "owned" in str(error)


def formatted(log: Callable[[logging.Logger], None]) -> str:
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    logger = logging.Logger("a logger")
    logger.addHandler(listener := Listener())
    listener.setFormatter(OneLineFormatter("pilotfish: %(message)s"))
    log(logger)
    (line,) = lines
    return line


def test_a_log_line_stays_a_line() -> None:
    line = formatted(lambda logger: logger.warning("a pool said %s", COMMANDS))
    assert line.startswith("pilotfish: a pool said ") and line.isprintable()


def test_a_traceback_stays_below_its_line() -> None:
    def fail(logger: logging.Logger) -> None:
        try:
            raise ValueError(COMMANDS + "\nforged")
        except ValueError:
            logger.exception("failed")

    first, *rest = formatted(fail).split("\n")
    assert first == "pilotfish: failed" and all(line.startswith("  | ") and line.isprintable() for line in rest)
