"""Functions that a model may call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Tool:
    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None  # the JSON schema of its arguments; None: any object
    strict: bool = False
