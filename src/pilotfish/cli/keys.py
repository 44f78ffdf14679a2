import shlex
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from pilotfish.config.hardware.tables import read_table
from pilotfish.errors import ParameterError
from pilotfish.server.auth import file_entry, new_secret
from pilotfish.wire.curve_keys import load_key_pair, new_key_pair, write_key_pair

TEXTS = read_table(__file__, "keys", dict[str, str])
HELP = "Keys between servers, targets and pools, and of the server's clients (docs/security.md)."

app = typer.Typer(help=HELP, no_args_is_help=True)


@app.command()
def new(name: Annotated[str, typer.Argument(help="The key goes into NAME.key.")]) -> None:
    """Make a key; print its public half and how to use it."""
    if not Path(name).name:
        raise ParameterError("name", name, "the name of a file, without .key")
    pair, path = new_key_pair(), Path(f"{name}.key")
    write_key_pair(pair, path)
    sys.stdout.write(TEXTS["curve"].format(path=path, public=pair.public, quoted=shlex.quote(pair.public)))


@app.command()
def show(file: Annotated[Path, typer.Argument(help="A key file.")]) -> None:
    """Print the public half of a key."""
    sys.stdout.write(load_key_pair("file", file).public + "\n")


@app.command()
def api(name: Annotated[str, typer.Argument(help="Whose key it is, in logs and metrics.")]) -> None:
    """Make a key of a client of the server; print its secret and its entry in the server's file."""
    secret = new_secret()
    sys.stdout.write(TEXTS["api"].format(secret=secret, entry=textwrap.indent(file_entry(name, secret), "    ")))
