"""A model's configuration, as the rest of the package takes it. Imports no torch."""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from pilotfish.errors import ModelError, ParameterError
from pilotfish.model.loading.layer_features import refuse_nonsense, refuse_unsupported
from pilotfish.model.loading.metadata import eos_ids, one_line, quiet, read_object


def load_config(directory: Path, max_model_len: int = 0) -> Any:
    """The model's configuration, with its `num_key_value_heads`, `head_dim` and `context`: `max_model_len` positions
    unless that is 0. ModelError unless it is served, ParameterError for more positions than the model's."""
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(f"model: {directory} has no config.json; a Hugging Face model directory is needed")
    fields = read_object(path)
    refuse_nonsense(fields, path)
    eos_ids(path, fields.get("eos_token_id"), vocab_size=None)  # one line, where transformers' error has three
    try:
        config = deepcopy(_parsed(directory, path.read_bytes()))
    except Exception as error:  # errors in files and fields have no common base
        raise ModelError(f"model: {path} cannot be read: {one_line(error)}") from error
    refuse_unsupported(config, directory)
    _complete(config, directory, max_model_len)
    return config


@lru_cache(maxsize=16)
def _parsed(directory: Path, text: bytes) -> Any:  # noqa: ARG001  # what the directory's config.json holds
    """transformers' configuration of a directory: a start asks for it a dozen times, and transformers is slow."""
    with quiet():
        return AutoConfig.from_pretrained(directory)


def _complete(config: Any, directory: Path, max_model_len: int) -> None:
    heads = config.num_attention_heads
    config.num_key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if heads % config.num_key_value_heads:
        divided = f"{heads} attention heads do not divide into {config.num_key_value_heads} KV heads"
        raise ModelError(f"model: {directory}: {divided}")
    if max_model_len > config.max_position_embeddings:
        allowed = f"at most {config.max_position_embeddings}, the model's context"
        raise ParameterError("max_model_len", max_model_len, allowed)
    config.context = max_model_len or config.max_position_embeddings
