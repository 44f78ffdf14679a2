"""Model metadata that needs no weights. Imports no torch: the HTTP server's process has none."""

import hashlib
import json
import logging
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from pilotfish.core.drafting.vocabulary import leave_out
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.errors import ModelError, ParameterError

logger = logging.getLogger(__name__)

#: Files of which any can hold a vocabulary; without one transformers makes tokenizers of nothing but special tokens.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
#: The tokenizer's own limit would be a warning on stderr. The engine holds prompts against the model's context.
NO_LIMIT = 1 << 62
#: Fields of generation_config.json; the file explains them.
_FIELDS = tomllib.loads(Path(__file__).with_name("generation_config.toml").read_text("utf-8"))


def read_object(path: Path) -> dict[str, Any]:
    """ModelError, naming the file, for anything but a JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"model: {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8 either
        raise ModelError(f"model: {path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"model: {path} holds a {type(value).__name__}; a JSON object is needed")
    return value


def config_digest(directory: Path) -> str:
    """Digest of config.json without the model's path and transformers' version; "" if there is none."""
    if not (directory / "config.json").is_file():
        return ""
    fields = read_object(directory / "config.json")
    own = {name: value for name, value in fields.items() if name not in ("_name_or_path", "transformers_version")}
    return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()


def load_tokenizer(directory: Path) -> Any:
    """Without entries that the embedding lacks, as far as config.json tells. ModelError names the file."""
    if not directory.is_dir():
        raise ModelError(f"model: {directory} is not a directory")
    found = [directory / name for name in VOCABULARIES if (directory / name).is_file()]
    if not found:
        raise ModelError(f"tokenizer: {directory} has no {VOCABULARIES[0]}")
    vocab_size = _vocab_size(directory)
    try:
        with quiet():  # it reads config.json too, and logs about that
            tokenizer = AutoTokenizer.from_pretrained(directory)
        if tokenizer.chat_template is None and (directory / "chat_template.json").is_file():  # of multimodal models
            tokenizer.chat_template = read_object(directory / "chat_template.json").get("chat_template")
        if vocab_size is not None and hasattr(tokenizer, "backend_tokenizer"):
            leave_out(tokenizer, vocab_size)
    except Exception as error:  # errors in files have no common base
        for path in (found[0], directory / "tokenizer_config.json"):
            if path.suffix == ".json" and path.is_file():
                read_object(path)
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise ModelError(f"tokenizer: {found[0]} cannot be used: {reason}") from error
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ModelError(f"tokenizer: {found[0]} is of a kind that is not supported; {VOCABULARIES[0]} is needed")
    tokenizer.model_max_length = NO_LIMIT
    return tokenizer


def _vocab_size(directory: Path) -> int | None:
    path = directory / "config.json"
    fields = read_object(path) if path.is_file() else {}
    text = fields.get("text_config")
    size = fields.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
    return size if isinstance(size, int) and size > 0 else None


@dataclass(frozen=True)
class GenerationConfig:
    eos_ids: frozenset[int]
    defaults: dict[str, Any]  # fields of SamplingParams, for requests that leave them out


def read_generation_config(directory: Path, config_eos: Any = None, vocab_size: int | None = None) -> GenerationConfig:
    """ModelError for impossible values. `config_eos`, config.json's end of sequence, holds if the file has none. As in
    vLLM `do_sample` does not count: a request asks for `temperature` 0."""
    path = directory / "generation_config.json"
    fields = read_object(path) if path.is_file() else {}
    for name, idle in _FIELDS["unsupported"].items():
        if fields.get(name) not in (None, idle, [], {}):
            logger.warning("%s: %s %r is not supported and has no effect", path, name, fields[name])
    given = {ours: fields.get(name) for name, ours in _FIELDS["defaults"].items()}
    defaults = {ours: _number(value) for ours, value in given.items() if value is not None}
    try:
        SamplingParams(**defaults)
    except ParameterError as error:
        raise ModelError(f"model: {path}: {error}") from error
    own = fields.get("eos_token_id")
    source, eos = (directory / "config.json", config_eos) if own is None else (path, own)
    return GenerationConfig(eos_ids(source, eos, vocab_size), defaults)


def _number(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def eos_ids(path: Path, value: Any, vocab_size: int | None) -> frozenset[int]:
    """ModelError for an id outside the vocabulary."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    limit = 1 << 31 if vocab_size is None else vocab_size
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < limit:
            raise ModelError(
                f"model: {path}: eos_token_id: {token!r} is not allowed; expected token ids 0 to {limit - 1}"
            )
    return frozenset(ids)


@contextmanager
def quiet(*names: str, level: int = logging.CRITICAL) -> Iterator[None]:
    """Silences the loggers `names` (default: transformers') below `level`, and transformers' progress bars."""
    transformers_logging.disable_progress_bar()
    loggers = [logging.getLogger(name) for name in names or ("transformers",)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, before in zip(loggers, levels, strict=True):
            logger.setLevel(before)


def log_through_root() -> None:
    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()


def one_line(error: BaseException) -> str:
    """The first line of a library's error, and the second if the first only announces it."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:300]
