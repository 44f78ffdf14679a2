"""The command line of `vllm serve`, as ours."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import typer
from typer.core import TyperCommand, TyperOption

from pilotfish.cli.vllm_flags import FLAGS, OFF, ON, SHORT, Flag
from pilotfish.errors import InputError

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
    """The words up to the next option."""
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
