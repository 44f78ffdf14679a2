"""The command line of `vllm serve`, and its `--speculative-config`, as ours."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import typer
from typer.core import TyperCommand, TyperOption

from pilotfish.cli.vllm_flags import FLAGS, OFF, ON, SHORT, Flag
from pilotfish.command import Given
from pilotfish.config import EngineConfig
from pilotfish.errors import InputError, ParameterError, UnknownOptionError
from pilotfish.options import Option, options_of

#: Options that take all words up to the next one.
SEVERAL = ("--served-model-name", "--api-key")
#: Options that say which model to serve.
MODEL = ("--model", "--target", "--pair")


class ServeCommand(TyperCommand):
    """Takes the arguments of `vllm serve` too."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        options = [option for option in self.get_params(ctx) if isinstance(option, TyperOption)]
        switches = {name for option in options if option.is_flag for name in (*option.opts, *option.secondary_opts)}
        return super().parse_args(ctx, translated(args, switches))


@dataclass(frozen=True)
class _Option:
    name: str  # with hyphens
    value: str | None  # where `=` gives one

    @classmethod
    def of(cls, word: str) -> _Option:
        if re.fullmatch(r"-O\d", word):
            return cls("--optimization-level", word[2:])
        name, equals, value = word.partition("=")
        long = name.replace("_", "-") if name.startswith("--") else SHORT.get(name, name)
        return cls(long, value if equals else None)

    @property
    def switched(self) -> _Option:
        """--x for --no-x."""
        return _Option(self.name.replace("--no-", "--", 1), OFF if self.name.startswith("--no-") else ON)

    def __str__(self) -> str:
        return self.name if self.value is None else f"{self.name}={self.value}"


def translated(arguments: Sequence[str], switches: Collection[str] = ()) -> list[str]:
    """As our options: names with hyphens, a value for each but for `switches`, nothing that changes nothing. InputError
    for a flag that asks for what is not done here.

    Where MODEL comes after --served-model-name or --api-key, these take one value each."""
    words, ours = deque(arguments), list[str]()
    several = any(_is_option(word) and _Option.of(word).name in MODEL for word in words)
    while words:
        word = words.popleft()
        if word == "--":
            return [*ours, word, *words]
        if _is_option(word):
            ours += _translated_option(_Option.of(word), words, switches, several=several)
        else:
            ours.append(word)
            several = True  # it is MODEL
    return ours


def _is_option(word: str) -> bool:
    return re.match(r"-[^\d]", word) is not None


def _translated_option(option: _Option, rest: deque[str], switches: Collection[str], *, several: bool) -> list[str]:
    flag = FLAGS.get(option.name[2:]) or FLAGS.get(option.switched.name[2:])
    if flag is not None:
        _check(option, flag, rest)
        return []
    if "." in option.name:
        whole = option.name.partition(".")[0]
        raise InputError(f"{option.name}: keys are not given one by one; give {whole} a whole JSON object")
    if several and option.name in SEVERAL and option.value is None:
        return [part for value in _values(rest) for part in (option.name, value)] or [option.name]
    if option.value is None and option.name not in switches and rest:
        return [option.name, rest.popleft()]
    return [str(option)]


def _values(rest: deque[str]) -> list[str]:
    values = []
    while rest and not _is_option(rest[0]):
        values.append(rest.popleft())
    return values


def _check(option: _Option, flag: Flag, rest: deque[str]) -> None:
    """InputError unless it changes nothing."""
    if flag.switch:
        if option.value is not None:
            raise InputError(f"{option.name}: it takes no value, but was given {option.value!r}: {flag.why}")
        if option.switched.value not in flag.accepted:
            raise InputError(f"{option.name}: {flag.why}")
        return
    value = option.value
    if value is None and rest and not _is_option(rest[0]):
        value = rest.popleft()
    if value not in flag.accepted:
        given = option.name if value is None else f"{option.name} {value!r}"
        accepted = f"; {' or '.join(flag.accepted)} is accepted" if flag.accepted else ""
        raise InputError(f"{given}: {flag.why}{accepted}")


# -- --speculative-config

FIELD = "speculative_config"
#: vLLM's methods that are served, and our drafters that do the same.
METHODS = {"ngram": "ngram", "suffix": "suffix", "draft_model": "lm"}
#: Keys whose only accepted value says what is the case anyway.
AS_IT_IS: dict[str, Any] = {
    "draft_tensor_parallel_size": 1,
    "rejection_sample_method": "standard",
    **dict.fromkeys(("parallel_drafting", "use_heterogeneous_vocab", "enforce_eager"), False),
    **dict.fromkeys(("revision", "code_revision")),
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
_ENGINE = options_of(EngineConfig)
#: Keys that have a meaning here, and their values.
KEYS = {
    "method": Option("method", Literal, choices=tuple(METHODS)),
    "model": Option("model", str),
    "num_speculative_tokens": _ENGINE["nodes"],
    "prompt_lookup_min": _ENGINE["ngram_min"],
    "prompt_lookup_max": _ENGINE["ngram_max"],
    "enable_adaptive_verification": Option("enable_adaptive_verification", bool),
}


def with_speculative_config(engine: Given, text: str | None) -> Given:
    """The engine's options with those that `text` asks for. ParameterError, naming the key, for what cannot be;
    UnknownOptionError for a key that vLLM does not have either."""
    if text is None:
        return engine
    given = _object(text)
    given.setdefault("method", "draft_model" if "model" in given else None)
    options = {"mode": "sync", **engine}
    for name, value in given.items():
        options |= _meaning(name, value)
    if given["method"] == "draft_model" and "draft" not in options and "target" in options:
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


def _meaning(name: str, value: Any) -> Given:
    """Our options for a key of vLLM's."""
    field = f"{FIELD}.{name}"
    if name in REFUSED:
        raise ParameterError(field, value, REFUSED[name])
    if name in AS_IT_IS:
        if value != AS_IT_IS[name]:
            raise ParameterError(field, value, json.dumps(AS_IT_IS[name]))
        return {}
    if name not in KEYS:
        raise UnknownOptionError(field, sorted({*KEYS, *AS_IT_IS}))
    replace(KEYS[name], name=field).check(value)
    match name:
        case "method":
            return {"drafter": METHODS[value]}
        case "model":
            return {"draft": Path(value)}
        case "num_speculative_tokens":  # a chain where the drafter gives chains
            return {"nodes": value, "levels": min(value, 64)}
        case "enable_adaptive_verification":
            return {"budget": "auto" if value else "fixed"}
    return {KEYS[name].name: value}
