"""`pilotfish kv`: directories in which servers keep KV."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from pilotfish.cli.options import JsonOption
from pilotfish.cli.show import print_json, progress_bar
from pilotfish.printable import one_line

if TYPE_CHECKING:
    from pilotfish.kv.upkeep import DirectorySummary

app = typer.Typer(help="Directories of KV on disk (docs/kv-cache.md).", no_args_is_help=True)

Directory = Annotated[Path, typer.Argument(help="What a server was given as --kv-disk.")]
T = TypeVar("T")


@app.command()
def ls(directory: Directory, json: JsonOption = False) -> None:
    """Say what a directory holds and who uses it."""
    from pilotfish.kv.upkeep import summary

    held = summary(directory)
    print_json({"directory": str(directory), **dataclasses.asdict(held)}) if json else _print(directory, held)


@app.command()
def verify(
    directory: Directory,
    remove: Annotated[bool, typer.Option("--remove", help="Remove bad files; not beside a live server.")] = False,
    json: JsonOption = False,
) -> None:
    """Read every object and check its header, checksum and name. Exit 1: some are bad."""
    from pilotfish.kv.upkeep import verify

    result = verify(directory, remove=remove, watched=_watched)
    if json:
        print_json({"directory": str(directory), **dataclasses.asdict(result)})
    else:
        for bad in result.bad:
            _say(f"{bad.file}: {bad.reason}{', removed' * bad.removed}")
        _say(f"{result.objects} objects, {len(result.bad)} bad")
    raise typer.Exit(1 if result.bad else 0)


@app.command()
def purge(directory: Directory, json: JsonOption = False) -> None:
    """Remove all KV, and nothing else, from a directory that no server uses."""
    from pilotfish.kv.upkeep import purge

    gone = purge(directory)
    if json:
        print_json({"directory": str(directory), **dataclasses.asdict(gone)})
    else:
        _say(f"removed {gone.objects} objects, {decimal(gone.bytes)}")


def _say(line: str) -> None:
    sys.stdout.write(one_line(line) + "\n")


def _watched(files: Sequence[T]) -> Iterator[T]:
    with progress_bar(Console(stderr=True), len(files), "objects") as advance:
        for file in files:
            yield file
            advance()


def _print(directory: Path, held: DirectorySummary) -> None:
    rows = {
        "directory": str(directory),
        "shape": held.shape,
        "objects": f"{held.objects}, of {decimal(held.object_bytes)} each",
        "tokens": str(held.tokens),
        "bytes": f"{held.bytes} ({decimal(held.bytes)})",
        "unfinished": f"{held.unfinished} files",
        "oldest use": _time(held.oldest_use),
        "newest use": _time(held.newest_use),
        "used by": "nobody" if held.owner is None else f"process {held.owner}",
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in rows.items():
        table.add_row(name, Text(one_line(value), overflow="fold"))
    Console(highlight=False).print(table)


def _time(seconds: float | None) -> str:
    return "never" if seconds is None else datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")
