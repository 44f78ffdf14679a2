"""What is to be known of a model without its weights. Imports no torch: a server's own process has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from pilotfish.errors import ModelError


def load_tokenizer(directory: Path) -> Any:
    """The model's tokenizer; ModelError when the directory has none."""
    if not directory.is_dir():
        raise ModelError(f"model: {directory} is not a directory")
    try:
        return AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"tokenizer: {directory} has none that can be loaded: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """The first line of what a library says."""
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:300]
