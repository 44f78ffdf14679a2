import shlex
import sys
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from pilotfish.errors import ParameterError

USE = """\
{path} holds both halves: keep it on this machine. The public half is for others:

    {public}

If a server or a target has this key, the allowlist (--allow FILE) of whoever it dials needs a line of it, a tenant and
maybe a weight:

    {public} TENANT 1

If a target or a pool has it, whoever dials that is told so:

    --target-pool-key {quoted}
    --draft-pool-key {quoted}
    --prefill-pool-key {quoted}
"""

API_USE = """\
The secret is for the client alone, and is shown only now:

    {secret}

The file of the server (--api-keys FILE, mode 0600) needs this entry:

{entry}"""
HELP = "Keys between servers, targets and pools, and of the server's clients (docs/security.md)."

app = typer.Typer(help=HELP, no_args_is_help=True)


@app.command()
def new(name: Annotated[str, typer.Argument(help="The key goes into NAME.key.")]) -> None:
    """Make a key; print its public half and how to use it."""
    if not Path(name).name:
        raise ParameterError("name", name, "the name of a file, without .key")
    from pilotfish.wire.curve_keys import new_key_pair, write_key_pair

    pair, path = new_key_pair(), Path(f"{name}.key")
    write_key_pair(pair, path)
    sys.stdout.write(USE.format(path=path, public=pair.public, quoted=shlex.quote(pair.public)))


@app.command()
def show(file: Annotated[Path, typer.Argument(help="A key file.")]) -> None:
    """Print the public half of a key."""
    from pilotfish.wire.curve_keys import load_key_pair

    sys.stdout.write(load_key_pair("file", file).public + "\n")


@app.command()
def api(name: Annotated[str, typer.Argument(help="Whose key it is, in logs and metrics.")]) -> None:
    """Make a key of a client of the server; print its secret and its entry in the server's file."""
    from pilotfish.server.auth import file_entry, new_secret

    secret = new_secret()
    sys.stdout.write(API_USE.format(secret=secret, entry=textwrap.indent(file_entry(name, secret), "    ")))
