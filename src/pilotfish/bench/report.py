"""How results reach the terminal: tables or JSON on stdout, progress on stderr."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from pilotfish.errors import ParameterError
from pilotfish.printable import one_line

#: Columns of tables that go to a file or a pipe.
FILE_WIDTH = 160
#: Columns of a bar.
BAR_WIDTH = 60


def progress() -> Progress:
    """A bar on stderr with the time that is left."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True), redirect_stdout=False)


def print_table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """One table; all columns but the first are right-aligned."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left")
    for row in rows:
        table.add_row(*(Text(one_line(str(cell))) for cell in row))
    Console(width=None if sys.stdout.isatty() else FILE_WIDTH).print(table)


def print_bars(header: Sequence[str], values: Mapping[str, float], mark: float) -> None:
    """Name, value and a bar from 0 on for each, with a stroke where `mark` lies."""
    most = max(*values.values(), mark)
    rows = [(name, f"{value:.1f}", bar_of(value / most, mark / most)) for name, value in values.items()]
    print_table("", header, rows)


def bar_of(share: float, mark: float) -> str:
    """`BAR_WIDTH` characters, of which `share` are filled."""
    filled, at = round(share * BAR_WIDTH), min(round(mark * BAR_WIDTH), BAR_WIDTH - 1)
    return "".join("┃" if i == at else "█" if i < filled else "·" for i in range(BAR_WIDTH))


def as_json(report: Any) -> str:
    """A dataclass as JSON text."""
    return json.dumps(dataclasses.asdict(report), indent=2)


def print_json(report: Any) -> None:
    sys.stdout.write(as_json(report) + "\n")


def write_json(report: Any, path: Path) -> None:
    """To a file; ParameterError when it cannot be written."""
    try:
        path.write_text(as_json(report) + "\n")
    except OSError as error:
        raise ParameterError("out", str(path), f"a file that can be written ({error.strerror})") from error
