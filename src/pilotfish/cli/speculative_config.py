"""`--speculative-config`: vLLM's JSON, key by key; what has no meaning here is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pilotfish.cli.options import EngineOptions
from pilotfish.errors import ParameterError, UnknownOptionError

FIELD = "speculative_config"
#: vLLM's methods that are served, and our drafters that do the same.
METHODS = {"ngram": "ngram", "suffix": "suffix", "draft_model": "lm"}
#: Keys whose only accepted values say what is the case anyway.
AS_IT_IS: dict[str, tuple[Any, ...]] = {
    "draft_tensor_parallel_size": (1,),
    "parallel_drafting": (False,),
    "use_heterogeneous_vocab": (False,),
    "enforce_eager": (False,),
    "rejection_sample_method": ("standard",),
    "revision": (None,),
    "code_revision": (None,),
}
#: Keys of vLLM that ask for what is not done here, and what to do instead.
REFUSED = {
    "quantization": "--quantization, which is of target and draft",
    "max_model_len": "nothing: a draft's context is its model's",
    "num_speculative_tokens_per_batch_size": "nothing: measured costs decide it, with --budget auto",
    "draft_sample_method": "nothing: a draft mirrors the target's noise",
    "tensor_parallel_size": "nothing: drafts run on one device",
    "speculative_model": "model",
}


@dataclass(frozen=True)
class _Key:
    kind: type
    allowed: str
    apply: Callable[[EngineOptions, Any], EngineOptions]
    valid: Callable[[Any], bool] = lambda _: True


def _option(name: str) -> Callable[[EngineOptions, Any], EngineOptions]:
    return lambda options, value: replace(options, **{name: value})


def _tokens(options: EngineOptions, count: int) -> EngineOptions:
    """So many guesses a step: a chain where the drafter gives chains."""
    return replace(options, nodes=count, levels=min(count, 64))


KEYS = {
    "method": _Key(
        str,
        ", ".join(METHODS),
        lambda options, method: replace(options, drafter=METHODS[method], mode=options.mode or "sync"),
        lambda method: method in METHODS,
    ),
    "model": _Key(str, "a draft's directory", lambda options, path: replace(options, draft=Path(path))),
    "num_speculative_tokens": _Key(int, "an integer 1 to 1024", _tokens, lambda count: 1 <= count <= 1024),
    "prompt_lookup_min": _Key(int, "an integer 1 to 16", _option("ngram_min"), lambda n: 1 <= n <= 16),
    "prompt_lookup_max": _Key(int, "an integer 1 to 16", _option("ngram_max"), lambda n: 1 <= n <= 16),
    "enable_adaptive_verification": _Key(
        bool, "true or false", lambda options, on: replace(options, budget="auto" if on else "fixed")
    ),
}


def with_speculative_config(options: EngineOptions, text: str | None) -> EngineOptions:
    """`options` with what `text` asks for. ParameterError, naming the key, for what cannot be; UnknownOptionError for a
    key that vLLM does not have either."""
    if text is None:
        return options
    given = _object(text)
    given.setdefault("method", "draft_model" if "model" in given else None)
    for name, value in given.items():
        options = _apply(options, name, value)
    if given["method"] == "draft_model" and options.draft is None and options.target is not None:
        raise ParameterError(f"{FIELD}.model", None, "a draft's directory")
    return options


def _object(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ParameterError(FIELD, text, f"JSON ({error})") from error
    if not isinstance(given, dict):
        raise ParameterError(FIELD, text, "a JSON object")
    return given


def _apply(options: EngineOptions, name: str, value: Any) -> EngineOptions:
    field = f"{FIELD}.{name}"
    if name in REFUSED:
        raise ParameterError(field, value, REFUSED[name])
    if name in AS_IT_IS:
        if value not in AS_IT_IS[name]:
            raise ParameterError(field, value, " or ".join(json.dumps(allowed) for allowed in AS_IT_IS[name]))
        return options
    key = KEYS.get(name)
    if key is None:
        raise UnknownOptionError(field, sorted({*KEYS, *AS_IT_IS}))
    if type(value) is not key.kind or not key.valid(value):
        raise ParameterError(field, value, key.allowed)
    return key.apply(options, value)
