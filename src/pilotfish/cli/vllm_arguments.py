"""The command line of `vllm serve`, and its `--speculative-config`, as ours; `vllm.toml` has the tables."""

import json
import re
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import typer
from typer.core import TyperCommand, TyperOption

from pilotfish.command import Given
from pilotfish.config.engine import EngineConfig
from pilotfish.config.hardware.tables import read_table
from pilotfish.errors import InputError, ParameterError, UnknownOptionError
from pilotfish.options import Option, options_of

#: Options that take all words up to the next option.
SEVERAL = ("--served-model-name", "--api-key")
#: Options that name the model to serve.
MODEL = ("--model", "--target", "--pair")
_TABLES = read_table(__file__, "vllm", dict[str, Any])


@dataclass(frozen=True)
class Flag:
    why: str
    accepted: tuple[str, ...] = ()
    switch: bool = False  # whether it is --x, for `on`, or --no-x, for `off`, without a value


#: Flags of `vllm serve` that are not ours.
FLAGS = {
    name: Flag(why, tuple(accepted["switch"]), True) if isinstance(accepted, dict) else Flag(why, tuple(accepted))
    for why, flags in _TABLES["flags"].items()
    for name, accepted in flags.items()
}


class ServeCommand(TyperCommand):
    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        options = [option for option in self.get_params(ctx) if isinstance(option, TyperOption)]
        switches = {name for option in options if option.is_flag for name in (*option.opts, *option.secondary_opts)}
        return super().parse_args(ctx, translated(args, switches))


def translated(arguments: Sequence[str], switches: Collection[str] = ()) -> list[str]:
    """InputError for a flag that asks for a missing feature. Each option takes a value, but for `switches`, and
    SEVERAL, which take all words up to the next option unless MODEL comes after them."""
    words, ours = deque(arguments), list[str]()
    several = any(_is_option(word) and _name_and_value(word)[0] in MODEL for word in words)
    while words:
        word = words.popleft()
        if word == "--":
            return [*ours, word, *words]
        if not _is_option(word):
            ours.append(word)
            several = True  # it is MODEL
            continue
        name, value = _name_and_value(word)
        if (flag := FLAGS.get(name[2:]) or FLAGS.get(name.removeprefix("--no-"))) is not None:
            _check(flag, name, value, words)
        else:
            ours += _our_option(name, value, words, switches, several=several)
    return ours


def _is_option(word: str) -> bool:
    return re.match(r"-[^\d]", word) is not None


def _name_and_value(word: str) -> tuple[str, str | None]:
    if re.fullmatch(r"-O\d", word):
        word = f"-O={word[2:]}"
    name, equals, value = word.partition("=")
    long = name.replace("_", "-") if name.startswith("--") else _TABLES["short"].get(name, name)
    return long, value if equals else None


def _our_option(
    name: str, value: str | None, rest: deque[str], switches: Collection[str], *, several: bool
) -> list[str]:
    if "." in name:
        whole = name.partition(".")[0]
        raise InputError(f"{name}: keys are not given one by one; give {whole} a whole JSON object")
    if value is not None:
        return [f"{name}={value}"]
    values = []
    if several and name in SEVERAL:
        while rest and not _is_option(rest[0]):
            values.append(rest.popleft())
    elif name not in switches and rest:
        values.append(rest.popleft())
    return [part for value in values for part in (name, value)] or [name]


def _check(flag: Flag, name: str, value: str | None, rest: deque[str]) -> None:
    if flag.switch:
        if value is not None:
            raise InputError(f"{name}: it takes no value, but was given {value!r}: {flag.why}")
        if ("off" if name.startswith("--no-") else "on") not in flag.accepted:
            raise InputError(f"{name}: {flag.why}")
        return
    if value is None and rest and not _is_option(rest[0]):
        value = rest.popleft()
    if value not in flag.accepted:
        given = name if value is None else f"{name} {value!r}"
        accepted = f"; {' or '.join(flag.accepted)} is accepted" if flag.accepted else ""
        raise InputError(f"{given}: {flag.why}{accepted}")


FIELD = "speculative_config"
_SPECULATIVE = _TABLES["speculative"]
_ENGINE = options_of(EngineConfig)
_METHODS = _SPECULATIVE["methods"]
#: Known keys: their values, and the options that replace them.
KEYS: dict[str, tuple[Option, Callable[[Any], Given]]] = {
    "method": (Option("", Literal, choices=tuple(_METHODS)), lambda method: {"drafter": _METHODS[method]}),
    "model": (Option("", str), lambda path: {"draft": Path(path)}),
    # a chain where the drafter gives chains
    "num_speculative_tokens": (_ENGINE["nodes"], lambda count: {"nodes": count, "levels": min(count, 64)}),
    "prompt_lookup_min": (_ENGINE["ngram_min"], lambda count: {"ngram_min": count}),
    "prompt_lookup_max": (_ENGINE["ngram_max"], lambda count: {"ngram_max": count}),
    "parallel_drafting": (Option("", bool), lambda _: {}),  # a head's files say how it guesses
    "enable_adaptive_verification": (Option("", bool), lambda on: {"budget": "auto" if on else "fixed"}),
}


def with_speculative_config(engine: Given, text: str | None) -> Given:
    """ParameterError names a key with an impossible value; UnknownOptionError a key that vLLM lacks too."""
    if text is None:
        return engine
    try:
        given = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ParameterError(FIELD, text, f"a JSON object ({error})") from error
    given.setdefault("method", "draft_model" if "model" in given else None)
    options = {"mode": "sync", **engine}
    if given.get("parallel_drafting") is True and given["method"] != "eagle3":
        raise ParameterError(f"{FIELD}.parallel_drafting", True, "false, or method eagle3 with a head of P-EAGLE")
    for name, value in given.items():
        options |= _meaning(name, value)
    if _METHODS[given["method"]] == "lm" and "draft" not in options and "target" in options:
        raise ParameterError(f"{FIELD}.model", None, "the directory of a draft, or of a trained head")
    return options


def _meaning(name: str, value: Any) -> Given:
    field = f"{FIELD}.{name}"
    if name in _SPECULATIVE["refused"]:
        raise ParameterError(field, value, _SPECULATIVE["refused"][name])
    if (only := _SPECULATIVE["as_it_is"].get(name)) is not None:
        if value != json.loads(only):
            raise ParameterError(field, value, only)
        return {}
    if name not in KEYS:
        raise UnknownOptionError(field, sorted({*KEYS, *_SPECULATIVE["as_it_is"]}))
    option, meaning = KEYS[name]
    replace(option, name=field).check(value)
    return meaning(value)
