"""The JSON files of a model's directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pilotfish.errors import ModelError


def read_object(path: Path) -> dict[str, Any]:
    """ModelError, naming the file, unless it holds a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"model: {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8 either
        raise ModelError(f"model: {path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"model: {path} holds a {type(value).__name__}; a JSON object is needed")
    return value
