from pathlib import Path
from typing import TypeVar

import msgspec

from pilotfish.errors import ParameterError

Config = TypeVar("Config")


def config_text(config: object) -> str:
    return msgspec.json.encode(config, enc_hook=str).decode()


def config_of(text: str, kind: type[Config]) -> Config:
    """The inverse of `config_text`. ParameterError for another text."""
    try:
        return msgspec.json.decode(text, type=kind, dec_hook=lambda _, path: Path(path))
    except msgspec.DecodeError as error:
        raise ParameterError("config", text, f"an engine's configuration ({error})") from error
