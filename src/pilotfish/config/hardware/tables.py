"""Tables in TOML: every entry with its sources, looked up by name."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

from msgspec import Struct, convert

from pilotfish.errors import ParameterError

T = TypeVar("T")
#: How many names are suggested for one that is not known.
NEAREST = 3


class Sourced(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    sources: tuple[str, ...]  # addresses, or repository:path
    unverified: tuple[str, ...] = ()  # fields that no source was found for
    note: str = ""


def read_table(beside: str, name: str, kind: type[T]) -> T:
    """What `name`.toml beside a file holds. msgspec.ValidationError where a field is missing, unknown or of another
    type."""
    return convert(tomllib.loads(Path(beside).with_name(f"{name}.toml").read_text(encoding="utf-8")), kind)


def look_up(table: Mapping[str, T], field: str, what: str, name: str) -> T:
    """The entry `name`, in upper or lower case. ParameterError naming `field` and the nearest names."""
    if (found := table.get(name.lower())) is None:
        nearest = get_close_matches(name.lower(), table, NEAREST, cutoff=0.0)
        raise ParameterError(field, name, f"one of the {what} of docs/planning.md; nearest: {', '.join(nearest)}")
    return found
