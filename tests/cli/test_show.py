"""What `generate` prints for people: on a terminal nothing that it would obey, in a pipe the text as it is."""

from typing import Any

import pytest

from pilotfish.cli.generate import Printer, records, report
from pilotfish.engine.llm import Completion, RequestOutput
from pilotfish.prompts import BadRow, Row

TEXT = "one\x1b[2J\x07\n\ttwo \u202e日本語"
STATS: dict[str, Any] = {"seconds": 1.0, "tokens_per_second": 3.0, "draft_tokens": 8, "accepted_tokens": 3}
STATS |= {"accepted_by_origin": {"draft 0": 2, "ngram": 1}, "tokens_per_verify_step": 1.5}


def shown(capfd: pytest.CaptureFixture[str], row_id: str = "row") -> str:
    row = Row(row_id, ("a",), chat=False, place="file:1")
    printer = Printer(json=False)
    output = Completion(0, [5, 6, 7], TEXT, "length", 7, STATS, None)
    for record in records(row, RequestOutput([1], [output], None), {}):
        printer.output(record)
    printer.end([])
    return capfd.readouterr().out


def test_a_terminal_is_given_no_commands(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    out = shown(capfd)
    assert "one\\x1b[2J\\x07\n" in out and "two \\u202e日本語" in out
    assert "\x1b[2J" not in out and "\u202e" not in out and "\x07" not in out


def test_a_pipe_is_given_the_text_and_who_guessed_it(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    out = shown(capfd)
    assert f"\n{TEXT}\n" in out and "3 of 8" in out and "accepted, guessed by: draft 0 2, ngram 1\n" in out


def test_ids_of_rows_are_escaped_and_no_markup(capfd: pytest.CaptureFixture[str]) -> None:
    out = shown(capfd, row_id="\x1b]0;owned\x07")
    assert r"\x1b]0;owned\x07 · seed 7" in out and "\x1b]" not in out
    assert shown(capfd, row_id="[/x] [red]y").count("[/x] [red]y") == 2  # above its text, and in the table


def test_a_bad_row_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    report(BadRow("file\x1b[2J:1", "the template refuses: \x07\n  forged\x9b"))
    assert capfd.readouterr().err == "file\\x1b[2J:1: the template refuses: \\x07 forged\\x9b\n"
