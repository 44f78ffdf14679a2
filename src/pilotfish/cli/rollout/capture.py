import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.filesize import decimal

from pilotfish.cli.options import JsonOption
from pilotfish.cli.reading import moment_of
from pilotfish.cli.show import WIDE, print_json, print_line, print_table, table_of
from pilotfish.errors import InputError, ParameterError
from pilotfish.operate.capture import upkeep

app = typer.Typer(help="Token ids that servers keep (docs/redistil.md).", no_args_is_help=True)

Directory = Annotated[Path, typer.Argument(help="What a server was given as --capture.")]


@app.command()
def show(directory: Directory, json: JsonOption = False) -> None:
    """Say how much is kept of each client, and since when; no tokens."""
    found = upkeep.summarize_partitions(directory)
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
    if (client is not None) + (before is not None) + all_rows != 1:
        raise InputError("purge: exactly one of --client, --before and --all is needed")
    if client is not None:
        gone = upkeep.purge_client(directory, client)
    elif before is not None:
        try:
            oldest = moment_of(before, time.time())
        except ValueError as error:
            raise ParameterError("before", before, "an ISO time, or an age as in 36h or 7d") from error
        gone = upkeep.purge_before(directory, oldest)
    else:
        gone = upkeep.purge_before(directory, math.inf)
    if json:
        print_json({"directory": str(directory), **asdict(gone)})
    else:
        print_line(f"removed {gone.files} files, {decimal(gone.bytes)}")


def _print(found: Sequence[upkeep.PartitionSummary], now: float) -> None:
    rows = [
        {
            "partition": one.name,
            "rows": one.rows,
            "prompt tokens": one.prompt_tokens,
            "output tokens": one.output_tokens,
            "bytes": decimal(one.bytes),
            "files": one.files,
            "oldest": _age(one.oldest, now),
            "newest": _age(one.newest, now),
        }
        for one in found
    ]
    print_table(table_of(rows), at_least=WIDE)


def _age(moment: float | None, now: float) -> str:
    if moment is None:
        return "none"
    hours = max(now - moment, 0) / 3600
    return f"{hours / 24:.1f} d ago" if hours >= 24 else f"{hours:.1f} h ago"
