"""`pilotfish keys`: the keys with which targets and draft pools know each other."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from pilotfish.errors import ParameterError

USE = """\
{path} holds both halves: keep it on this machine. The public half is for others:

    {public}

If a target has this key, the allowlist of the pool (--allow FILE) needs a line of it, a tenant and maybe a weight:

    {public} TENANT 1

If a draft pool has it, each target is told so:

    --draft-pool-key {quoted}
"""

app = typer.Typer(help="Keys between targets and draft pools (docs/security.md).", no_args_is_help=True)


@app.callback()
def keys() -> None:
    """Keys between targets and draft pools (docs/security.md)."""


@app.command()
def new(name: Annotated[str, typer.Argument(help="The key goes into NAME.key.")]) -> None:
    """Make a key; print its public half and how to use it."""
    if not Path(name).name:
        raise ParameterError("name", name, "the name of a file, without .key")
    from pilotfish.wire.keys import new_identity, write_identity

    identity, path = new_identity(), Path(f"{name}.key")
    write_identity(identity, path)
    sys.stdout.write(USE.format(path=path, public=identity.public, quoted=shlex.quote(identity.public)))


@app.command()
def show(file: Annotated[Path, typer.Argument(help="A key file.")]) -> None:
    """Print the public half of a key."""
    from pilotfish.wire.keys import load_identity

    sys.stdout.write(load_identity("file", file).public + "\n")
