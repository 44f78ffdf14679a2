"""What a model's own generation_config.json says: where outputs end, and how its makers sample."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotfish.core.sampling_params import SamplingParams
from pilotfish.errors import ModelError, ParameterError
from pilotfish.model.json_files import read_object

logger = logging.getLogger(__name__)

#: Its fields that are defaults of a request, by the name that SamplingParams has for them.
_DEFAULTS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
#: Fields that change what transformers would generate and that have no counterpart here, with their idle values.
_UNSUPPORTED: dict[str, Any] = {
    "min_new_tokens": 0,
    "min_length": 0,
    "max_length": None,
    "max_time": None,
    "stop_strings": None,
    "typical_p": 1.0,
    "top_h": None,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "penalty_alpha": None,
    "dola_layers": None,
    "guidance_scale": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
    "force_words_ids": None,
    "constraints": None,
    "sequence_bias": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "remove_invalid_values": False,
    "token_healing": False,
    "watermarking_config": None,
}


@dataclass(frozen=True)
class GenerationConfig:
    """`defaults` are fields of SamplingParams; a request's own values go first."""

    eos_ids: frozenset[int]
    defaults: dict[str, Any]


def read_generation_config(directory: Path, config_eos: Any = None, vocab_size: int | None = None) -> GenerationConfig:
    """ModelError for a file that cannot be read or asks for what cannot be. `config_eos` is config.json's end of
    sequence, which holds where the file has none; `vocab_size` None: not known here. As in vLLM `do_sample` does not
    count: a request asks for `temperature` 0."""
    path = directory / "generation_config.json"
    fields = read_object(path) if path.is_file() else {}
    for name, idle in _UNSUPPORTED.items():
        if fields.get(name) not in (None, idle, [], {}):
            logger.warning("%s: %s %r is not supported and has no effect", path, name, fields[name])
    defaults = {ours: _number(fields[name]) for name, ours in _DEFAULTS.items() if fields.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except ParameterError as error:
        raise ModelError(f"model: {path}: {error}") from error
    own = fields.get("eos_token_id")
    source, eos = (directory / "config.json", config_eos) if own is None else (path, own)
    return GenerationConfig(eos_ids(source, eos, vocab_size), defaults)


def _number(value: Any) -> Any:
    """What is an integer, written with a point, as one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def eos_ids(path: Path, value: Any, vocab_size: int | None) -> frozenset[int]:
    """The end-of-sequence ids that a file gives; ModelError for what is no id of the vocabulary."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    limit = 1 << 31 if vocab_size is None else vocab_size
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < limit:
            raise ModelError(
                f"model: {path}: eos_token_id: {token!r} is not allowed; expected token ids 0 to {limit - 1}"
            )
    return frozenset(ids)
