"""Schemas of JSON objects."""

from typing import Any


def object_of(*required: str, **properties: Any) -> dict[str, Any]:
    """Of an object with these properties alone."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
