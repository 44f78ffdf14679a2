from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from pilotfish.cli.show import DRAFTED, OWN, OriginStream, shows_colour
from pilotfish.core.scheduling.request import FinishReason
from pilotfish.errors import PromptError
from pilotfish.printable import one_line, printable_output

if TYPE_CHECKING:  # imports torch
    from pilotfish.engine.sample import Sample
    from pilotfish.wire.serving import Delta

SIGN, CONTINUED = "> ", "... "


def joined(line: Callable[[str], str | None]) -> str | None:
    """A turn: a line, continued by the next after a backslash at the end. `line` gets the prompt sign."""
    text = line(SIGN)
    while text is not None and text.endswith("\\"):
        text = f"{text[:-1]}\n{line(CONTINUED) or ''}"
    return text


class PlainScreen:
    """Turns are lines of stdin; stdout gets answers alone. Ctrl-C ends the program."""

    def greet(self, seed: int, *, drawn: bool) -> None:
        if drawn:
            self.note(f"seed {seed}")

    def turn(self) -> str | None:
        return joined(self._line)

    def _line(self, _: str) -> str | None:
        line = sys.stdin.buffer.readline()
        try:
            return line.decode().rstrip("\r\n") if line else None
        except UnicodeDecodeError as error:
            raise PromptError(f"turn: it is not UTF-8: {error}") from error

    @contextmanager
    def answering(self, sample: Sample) -> Iterator[Event]:
        yield Event()
        sys.stdout.write("" if sample.text.endswith("\n") else "\n")
        sys.stdout.flush()

    def piece(self, delta: Delta) -> None:
        sys.stdout.write(delta.text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        sys.stderr.write(f"{printable_output(text)}\n")

    def error(self, text: str) -> None:
        self.note(f"pilotfish: {one_line(text)}")


class TerminalScreen:
    """Answers coloured by origin, above figures. Ctrl-C ends an answer; twice at the prompt sign, the conversation."""

    def __init__(self, *, drafts: bool) -> None:
        with suppress(ImportError):
            import readline  # noqa: F401  # `input` then edits lines and remembers them
        self._console = Console(highlight=False)
        self._coloured = drafts and shows_colour(self._console)
        self._origins: OriginStream | None = None

    def greet(self, seed: int, *, drawn: bool) -> None:  # noqa: ARG002
        self.note(f"seed {seed} · /help lists the commands")
        if self._coloured:
            self._print(Text.assemble(("guessed by the draft", DRAFTED), (" · ", "dim"), ("the target's own", OWN)))

    def turn(self) -> str | None:
        with suppress(KeyboardInterrupt):
            return joined(self._line)
        try:
            self._print(Text())
            self.note("Ctrl-C again leaves")
            return joined(self._line)
        except KeyboardInterrupt:
            self._print(Text())
            return None

    def _line(self, sign: str) -> str | None:
        try:
            line = input(sign)
            line.encode()  # a byte that is no text may also have come through as a surrogate
        except EOFError:
            self._print(Text())
            return None
        except UnicodeError as error:
            raise PromptError(f"turn: it is no text: {error}") from error
        return line

    @contextmanager
    def answering(self, sample: Sample) -> Iterator[Event]:
        self._origins = OriginStream() if self._coloured else None
        with ctrl_c() as interrupted:
            yield interrupted
        self._print(Text(printable_output(sample.stream.take())), end="")  # it may have begun a stop string
        self._print(Text("" if sample.text.endswith("\n") else "\n"), end="")
        self.note(figures(sample))

    def piece(self, delta: Delta) -> None:
        self._print(self._origins.coloured(delta) if self._origins else Text(printable_output(delta.text)), end="")

    def note(self, text: str) -> None:
        self._print(Text(printable_output(text), style="dim"))

    def error(self, text: str) -> None:
        self._print(Text(one_line(text), style="yellow"))

    def _print(self, text: Text, end: str = "\n") -> None:
        self._console.print(text, end=end, soft_wrap=True)


#: Reads turns (None at the end; PromptError for a turn that is no text) and shows answers. `answering` goes around the
#: pieces of an answer, which ends when the event is set.
Screen = PlainScreen | TerminalScreen


def screen_for(*, drafts: bool) -> Screen:
    return TerminalScreen(drafts=drafts) if sys.stdin.isatty() and sys.stdout.isatty() else PlainScreen()


@contextmanager
def ctrl_c() -> Iterator[Event]:
    """Set by Ctrl-C, so that no step is interrupted; a second one raises KeyboardInterrupt."""
    interrupted = Event()

    def note(*_: object) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def figures(sample: Sample) -> str:
    stats = sample.stats()
    parts = [
        f"{len(sample.token_ids)} tokens",
        f"{stats['tokens_per_second']:.1f} tokens/s",
        f"{stats['tokens_per_verify_step']:.2f} per verify step",
    ]
    return " · ".join(parts if sample.finish_reason == FinishReason.STOP else [*parts, str(sample.finish_reason)])
