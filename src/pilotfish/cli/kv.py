import dataclasses
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.filesize import decimal

from pilotfish.cli.options import JsonOption
from pilotfish.cli.show import facts_table, print_json, print_line, print_table, progress_bar
from pilotfish.kv import upkeep

app = typer.Typer(help="Directories of KV on disk (docs/kv-cache.md).", no_args_is_help=True)

Directory = Annotated[Path, typer.Argument(help="What a server was given as --kv-disk.")]
T = TypeVar("T")


@app.command()
def ls(directory: Directory, json: JsonOption = False) -> None:
    """Say what a directory holds and who uses it."""
    held = upkeep.summary(directory)
    if json:
        _print_record(directory, held)
        return
    facts = {
        "directory": directory,
        "shape": held.shape,
        "objects": f"{held.objects}, of {decimal(held.object_bytes)} each",
        "tokens": held.tokens,
        "bytes": f"{held.bytes} ({decimal(held.bytes)})",
        "unfinished": f"{held.unfinished} files",
        "oldest use": _time(held.oldest_use),
        "newest use": _time(held.newest_use),
        "used by": "nobody" if held.owner is None else f"process {held.owner}",
    }
    print_table(facts_table(facts))


@app.command()
def verify(
    directory: Directory,
    remove: Annotated[bool, typer.Option("--remove", help="Remove bad files; not beside a live server.")] = False,
    json: JsonOption = False,
) -> None:
    """Read every object and check its header, checksum and name. Exit 1: some are bad."""
    result = upkeep.verify(directory, remove=remove, watched=_watched)
    if json:
        _print_record(directory, result)
    else:
        for bad in result.bad:
            print_line(f"{bad.file}: {bad.reason}{', removed' * bad.removed}")
        print_line(f"{result.objects} objects, {len(result.bad)} bad")
    raise typer.Exit(1 if result.bad else 0)


@app.command()
def purge(directory: Directory, json: JsonOption = False) -> None:
    """Remove all KV, and nothing else, from a directory that no server uses."""
    gone = upkeep.purge(directory)
    if json:
        _print_record(directory, gone)
    else:
        print_line(f"removed {gone.objects} objects, {decimal(gone.bytes)}")


def _print_record(directory: Path, record: Any) -> None:
    print_json({"directory": str(directory), **dataclasses.asdict(record)})


def _watched(files: Sequence[T]) -> Iterator[T]:
    with progress_bar(Console(stderr=True), len(files), "objects") as advance:
        for file in files:
            yield file
            advance()


def _time(seconds: float | None) -> str:
    return "never" if seconds is None else datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")
