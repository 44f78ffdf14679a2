"""What a model's own generation_config.json says: where outputs end, and how its makers sample."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotfish.core.sampling_params import SamplingParams
from pilotfish.errors import ModelError, ParameterError

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
_UNSUPPORTED = {
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": None,
    "guidance_scale": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
    "sequence_bias": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
}


@dataclass(frozen=True)
class GenerationConfig:
    """`defaults` are fields of SamplingParams; a request's own values go first."""

    eos_ids: frozenset[int]
    defaults: dict[str, Any]


def read_generation_config(directory: Path, config_eos: Any) -> GenerationConfig:
    """ModelError for a file that cannot be read or asks for what cannot be. `config_eos` is config.json's end of
    sequence, which holds where the file has none. As in vLLM `do_sample` does not count: a request asks for
    `temperature` 0."""
    path = directory / "generation_config.json"
    try:
        fields = json.loads(path.read_text()) if path.is_file() else {}
        eos = fields.get("eos_token_id")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"model: {path} cannot be read: {str(error).splitlines()[0]}") from error
    for name, idle in _UNSUPPORTED.items():
        if fields.get(name) not in (None, idle):
            logger.warning("%s: %s %r is not supported and has no effect", path, name, fields[name])
    defaults = {ours: fields[name] for name, ours in _DEFAULTS.items() if fields.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except ParameterError as error:
        raise ModelError(f"model: {path}: {error}") from error
    return GenerationConfig(_ids(config_eos if eos is None else eos), defaults)


def _ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list) else [value])
