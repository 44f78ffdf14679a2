"""Configurations as text, from which worker processes start."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from pilotfish.errors import ParameterError

Config = TypeVar("Config")


def config_text(config: object) -> str:
    return msgspec.json.encode(config, enc_hook=str).decode()


def config_of(text: str, kind: type[Config]) -> Config:
    """The configuration of `kind` that `config_text` wrote; ParameterError for what is none."""
    try:
        return msgspec.json.decode(text, type=kind, dec_hook=lambda _, path: Path(path))
    except msgspec.DecodeError as error:
        raise ParameterError("config", text, f"an engine's configuration ({error})") from error
