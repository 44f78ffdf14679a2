"""`pilotfish rollout capture`: folders in which servers keep token ids of requests that allow it."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from pilotfish.cli.options import JsonOption
from pilotfish.cli.show import print_json
from pilotfish.errors import InputError, ParameterError
from pilotfish.printable import one_line

if TYPE_CHECKING:
    from pilotfish.operate.capture.upkeep import PartitionSummary

app = typer.Typer(help="Token ids that servers keep (docs/redistil.md).", no_args_is_help=True)

HOURS = {"h": 1, "d": 24}
#: Characters, however narrow the terminal.
WIDTH = 140
Directory = Annotated[Path, typer.Argument(help="What a server was given as --capture.")]


@app.command()
def show(directory: Directory, json: JsonOption = False) -> None:
    """Say how much is kept of each client, and since when; no tokens."""
    from pilotfish.operate.capture.upkeep import summarize_partitions

    found = summarize_partitions(directory)
    if json:
        print_json({"directory": str(directory), "partitions": [asdict(one) for one in found]})
    else:
        _print(found, time.time())


@app.command()
def purge(
    directory: Directory,
    client: Annotated[str | None, typer.Option(help="Whose rows: the name of its key.")] = None,
    before: Annotated[
        str | None, typer.Option(metavar="TIME", help="All older rows: an ISO time, or an age as 36h or 7d.")
    ] = None,
    all_rows: Annotated[bool, typer.Option("--all", help="All rows.")] = False,
    json: JsonOption = False,
) -> None:
    """Remove rows. A server may use the folder meanwhile."""
    from pilotfish.operate.capture import upkeep

    if (client is not None) + (before is not None) + all_rows != 1:
        raise InputError("purge: exactly one of --client, --before and --all is needed")
    if client is not None:
        gone = upkeep.purge_client(directory, client)
    elif before is not None:
        gone = upkeep.purge_before(directory, _moment(before, time.time()))
    else:
        gone = upkeep.purge_rows(directory)
    if json:
        print_json({"directory": str(directory), **asdict(gone)})
    else:
        sys.stdout.write(one_line(f"removed {gone.files} files, {decimal(gone.bytes)}") + "\n")


def _moment(text: str, now: float) -> float:
    """Seconds since the epoch. ISO times without a zone are local."""
    try:
        if age := re.fullmatch(r"(\d{1,9})([hd])", text, re.ASCII):
            return now - int(age[1]) * HOURS[age[2]] * 3600
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise ParameterError("before", text, "an ISO time, or an age as in 36h or 7d") from error


def _print(found: Sequence[PartitionSummary], now: float) -> None:
    table = Table("partition", box=None, pad_edge=False)
    for heading in ("rows", "prompt tokens", "output tokens", "bytes", "files", "oldest", "newest"):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found:
        counts = map(str, (one.rows, one.prompt_tokens, one.output_tokens))
        table.add_row(
            one.name, *counts, decimal(one.bytes), str(one.files), _age(one.oldest, now), _age(one.newest, now)
        )
    console = Console(highlight=False)
    console.width = max(console.width, WIDTH)
    console.print(table)


def _age(moment: float | None, now: float) -> str:
    if moment is None:
        return "none"
    hours = max(now - moment, 0) / 3600
    return f"{hours / 24:.1f} d ago" if hours >= 24 else f"{hours:.1f} h ago"
