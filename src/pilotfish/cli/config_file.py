"""Options of a command from a file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import typer

from pilotfish.errors import InputError, ParameterError, UnknownOptionError


def with_defaults(context: typer.Context, path: Path | None) -> Path | None:
    """Makes what `path` says the defaults of the command's options: an eager option's callback. A key is an option's
    name, with hyphens or without. InputError for a file that is not TOML, ParameterError for one that cannot be read,
    UnknownOptionError for another key."""
    if path is None:
        return None
    given = {name.replace("-", "_"): value for name, value in _read(path).items()}
    known = sorted({str(one.name) for one in context.command.params} - {"config_file", "json"})
    for name in given:
        if name not in known:
            raise UnknownOptionError(name, known)
    context.default_map = {**(context.default_map or {}), **given}
    return path


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ParameterError("config", str(path), f"a file that can be read ({error.strerror})") from error
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError
        raise InputError(f"config: {path} is not TOML: {error}") from error
