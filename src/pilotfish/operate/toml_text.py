"""Texts of files that an operator writes."""

from __future__ import annotations

import tomllib
from typing import TypeVar

import msgspec

from pilotfish.errors import ParameterError

T = TypeVar("T")


def parsed(field: str, text: str, kind: type[T]) -> T:
    """Of TOML. ParameterError, naming `field`, which is also that of its page in docs/."""
    try:
        return msgspec.convert(tomllib.loads(text), kind)
    except tomllib.TOMLDecodeError as error:
        raise ParameterError(field, None, f"TOML ({error})") from error
    except msgspec.ValidationError as error:
        raise ParameterError(field, None, f"what docs/{field}.md says: {error}") from error
