"""What is to be known of a model without its weights. Imports no torch: a server's own process has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from pilotfish.errors import ModelError
from pilotfish.model.json_files import read_object
from pilotfish.model.quiet import one_line, quiet

#: Files of which any can hold a vocabulary; without one transformers makes tokenizers of nothing but special tokens.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
SETTINGS = "tokenizer_config.json"
#: The tokenizer's own limit would be a warning on stderr. The engine holds prompts against the model's context.
NO_LIMIT = 1 << 62


def load_tokenizer(directory: Path) -> Any:
    """The model's tokenizer; ModelError, naming the file, when the directory has none that can be used."""
    if not directory.is_dir():
        raise ModelError(f"model: {directory} is not a directory")
    found = [directory / name for name in VOCABULARIES if (directory / name).is_file()]
    if not found:
        raise ModelError(f"tokenizer: {directory} has no {VOCABULARIES[0]}")
    try:
        with quiet():  # it reads config.json too, and tells of that
            tokenizer = AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # what is wrong in a file has no common base
        for path in (found[0], directory / SETTINGS):
            if path.suffix == ".json" and path.is_file():
                read_object(path)
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise ModelError(f"tokenizer: {found[0]} cannot be used: {reason}") from error
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ModelError(f"tokenizer: {found[0]} is of a kind that is not supported; {VOCABULARIES[0]} is needed")
    tokenizer.model_max_length = NO_LIMIT
    return tokenizer
