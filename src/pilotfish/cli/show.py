from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pilotfish.config.engine import EngineConfig
from pilotfish.engine.processes.process import name_process
from pilotfish.printable import one_line, printable_output
from pilotfish.progress import Advance, PhaseProgress

if TYPE_CHECKING:
    from pilotfish.engine.engine import Engine
    from pilotfish.model.pacer import Pacer
    from pilotfish.wire.serving import Delta

#: Columns of a table in a file; of a wide one, however narrow the terminal.
FILE_WIDTH, WIDE = 140, 160
DRAFTED, OWN = "bold green", "magenta"  # text that the draft guessed, text that the target added


def print_json(record: object) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def print_line(*lines: str) -> None:
    sys.stdout.writelines(one_line(line) + "\n" for line in lines)


def warn_line(line: str) -> None:
    sys.stderr.write(one_line(line) + "\n")


def print_table(*tables: Table, in_file: int | None = None, at_least: int = 0) -> None:
    """`in_file`: width where stdout is no terminal; `at_least`: width in any case."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else in_file)
    console.width = max(console.width, at_least)
    console.print(*tables)


def table_of(
    rows: Iterable[Mapping[str, object]], *, left: Collection[str] = (), title: str | None = None, boxed: bool = False
) -> Table:
    """Columns are keys of rows; the first and those in `left` are aligned left. Cells are text, not markup."""
    rows = list(rows)
    table = Table(title=title and one_line(title), title_justify="left", box=HEAVY_HEAD if boxed else None)
    table.pad_edge = boxed
    for index, heading in enumerate(rows[0] if rows else ()):
        if index and heading not in left:
            table.add_column(heading, justify="right", no_wrap=True)
        else:
            table.add_column(heading, overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(one_line(str(cell))) for cell in row.values()))
    return table


def facts_table(facts: Mapping[str, object], title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    for name, value in facts.items():
        table.add_row(name, Text(one_line(str(value)), overflow="fold"))
    return table


def status(message: str, *, quiet: bool = False) -> AbstractContextManager[Any]:
    console = Console(stderr=True)
    return nullcontext() if quiet or not console.is_terminal else console.status(Text(one_line(message)))


@contextmanager
def progress_bar(console: Console | None, total: int, what: str = "rows") -> Iterator[Advance]:
    """The value is called for each of `what` that is done. No console: nothing is shown."""
    if console is None or (console.is_terminal and total < 2):
        yield lambda: None
        return
    with PhaseProgress(console, transient=True) as progress, progress.phase(what, total) as advance:
        yield advance


def started(config: EngineConfig) -> Engine:
    from pilotfish.model.loading.serving_imports import import_for_serving

    import_for_serving()
    from pilotfish.engine.engine import Engine

    if config.mode == "async":
        name_process("target")
    with status(f"loading {config.target}"):
        return Engine(config)


def paced(pacing: Sequence[Pacer]) -> Text:
    return Text(f"paced: {'; '.join(map(str, pacing))}", style="dim")


def warn_of_overruns(pacing: Sequence[Pacer]) -> None:
    for one in pacing:
        if not one.valid:
            warn_line(f"pilotfish: warning: this run is invalid, its device is too slow: {one}")


def shows_colour(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


class OriginStream:
    def __init__(self) -> None:
        self._shown = 0  # characters of the deltas so far

    def parts(self, delta: Delta) -> tuple[str, str]:
        """Drafted text and the target's own, safe to print. A character belongs to the token that completes it."""
        end = delta.ends[accepted - 1] if (accepted := sum(step.accepted for step in delta.verified)) else 0
        before, self._shown = self._shown, self._shown + len(delta.text)
        drafted = max(end - before, 0)
        return printable_output(delta.text[:drafted]), printable_output(delta.text[drafted:])

    def coloured(self, delta: Delta) -> Text:
        drafted, own = self.parts(delta)
        return Text.assemble((drafted, DRAFTED), (own, OWN))
