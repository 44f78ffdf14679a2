"""How `generate` prints: JSON lines for programs, text and a table for people."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from pilotfish.config.engine import EngineConfig
from pilotfish.engine.processes.process import name_process
from pilotfish.printable import one_line, printable, printable_output
from pilotfish.progress import Advance, PhaseProgress
from pilotfish.prompts import BadRow

if TYPE_CHECKING:
    from pilotfish.engine.engine import Engine
    from pilotfish.model.pacer import Pacer
    from pilotfish.wire.serving import Delta

DRAFTED, OWN = "bold green", "magenta"  # text that the draft guessed, text that the target added


def status(message: str, *, quiet: bool = False) -> AbstractContextManager[Any]:
    """A spinner on stderr, if that is a terminal."""
    console = Console(stderr=True)
    return nullcontext() if quiet or not console.is_terminal else console.status(Text(one_line(message)))


def started(config: EngineConfig) -> Engine:
    """Load an engine. Names this process if drafts have processes of their own."""
    from pilotfish.model.loading.serving_imports import import_for_serving

    import_for_serving()
    from pilotfish.engine.engine import Engine

    if config.mode == "async":
        name_process("target")
    with status(f"loading {config.target}"):
        return Engine(config)


def print_json(record: object) -> None:
    """Print an object on a line of stdout and flush it."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def report(row: BadRow) -> None:
    sys.stderr.write(one_line(f"{row.place}: {row.reason}") + "\n")


def paced(pacing: Sequence[Pacer]) -> Text:
    """Models that were paced, and how well they kept their pace."""
    return Text(f"paced: {'; '.join(map(str, pacing))}", style="dim")


def warn_of_overruns(pacing: Sequence[Pacer]) -> None:
    """Warn of each model that was too often too slow for its pace."""
    for one in pacing:
        if not one.valid:
            sys.stderr.write(f"pilotfish: warning: this run is invalid, its device is too slow: {one}\n")


class JsonPrinter:
    """Prints an object a line on stdout. Progress goes to stderr, unless stdout is a terminal as well."""

    def __init__(self) -> None:
        self.progress = None if sys.stdout.isatty() else Console(stderr=True)

    def begin(self, *about: str) -> None:
        """Print outputs only."""

    output = staticmethod(print_json)

    def end(self, pacing: Sequence[Pacer]) -> None:
        """Print outputs only."""


class TextPrinter:
    """Each row's text below its id, and a table of figures at the end. On a terminal control characters of a text are
    escaped; a pipe gets it as it is."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self.progress = self._console if self._console.is_terminal else Console(stderr=True)
        self._records: list[dict[str, Any]] = []

    def begin(self, *about: str) -> None:
        self._console.print(Text("\n".join(about), style="dim"), soft_wrap=True)

    def output(self, record: dict[str, Any]) -> None:
        self._records.append(record)
        self._console.print(Rule(Text(f"{_name(record)} · seed {record['seed']}"), align="left", style="dim"))
        self._text(record["text"])

    def _text(self, text: str) -> None:
        if self._console.is_terminal:
            self._console.print(Text(printable_output(text)), soft_wrap=True)
        else:  # rich would drop and expand control characters
            self._console.file.write(f"{text}\n")

    def end(self, pacing: Sequence[Pacer]) -> None:
        if self._records:
            self._console.print(_table(self._records))
        if guessers := _guessers(self._records):
            self._console.print(Text(f"accepted, guessed by: {guessers}", style="dim"), soft_wrap=True)
        if pacing:
            self._console.print(paced(pacing))


Printer = JsonPrinter | TextPrinter


@contextmanager
def progress_bar(console: Console | None, total: int, what: str = "rows") -> Iterator[Advance]:
    """Of work that is mostly short; call the value for each of `what` that is done. None: nothing is shown."""
    if console is None or (console.is_terminal and total < 2):
        yield lambda: None
        return
    with PhaseProgress(console, transient=True) as progress, progress.phase(what, total) as advance:
        yield advance


def _name(record: dict[str, Any]) -> str:
    return printable(f"{record['id']} [{record['index']}]" if "index" in record else str(record["id"]))


def _table(records: Sequence[dict[str, Any]]) -> Table:
    rows = list(map(_cells, records))
    table = Table(box=None, header_style="bold", pad_edge=False)
    first, *others = rows[0]
    table.add_column(first, overflow="fold")
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    for cells in rows:
        table.add_row(*map(Text, cells.values()))  # an id may look like rich's markup
    return table


def _cells(record: dict[str, Any]) -> dict[str, str]:
    stats = record["stats"]
    return {
        "id": _name(record),
        "prompt": str(record["prompt_tokens"]),
        "tokens": str(len(record["token_ids"])),
        "end": record["finish_reason"],
        "seconds": f"{stats['seconds']:.2f}",
        "tokens/s": f"{stats['tokens_per_second']:.1f}",
        "per step": f"{stats['tokens_per_verify_step']:.2f}",
        "accepted": f"{stats['accepted_tokens']} of {stats['draft_tokens']}",
    }


def _guessers(records: Sequence[dict[str, Any]]) -> str:
    counts = sum((Counter(record["stats"]["accepted_by_origin"]) for record in records), Counter[str]())
    return ", ".join(f"{name} {count}" for name, count in counts.most_common())


# -- who wrote which text


def shows_colour(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


class OriginStream:
    """Follows one sample's deltas and finds where in their text the draft's part ends."""

    def __init__(self) -> None:
        self._shown = 0  # characters of the deltas so far

    def parts(self, delta: Delta) -> tuple[str, str]:
        """The text of `delta`, safe to print: what the draft had guessed, and the target's own. A character belongs to
        the token that completes it."""
        end = delta.ends[accepted - 1] if (accepted := sum(step.accepted for step in delta.verified)) else 0
        before, self._shown = self._shown, self._shown + len(delta.text)
        drafted = max(end - before, 0)
        return printable_output(delta.text[:drafted]), printable_output(delta.text[drafted:])

    def coloured(self, delta: Delta) -> Text:
        drafted, own = self.parts(delta)
        return Text.assemble((drafted, DRAFTED), (own, OWN))
