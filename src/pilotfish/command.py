import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import typer

from pilotfish.errors import ParameterError
from pilotfish.options import REQUIRED, Option

Command = Callable[..., None]
#: Values of options by name; those that were not given and have no default are not in it.
Given = dict[str, Any]


def taking(*groups: Sequence[Option]) -> Callable[[Command], Command]:
    """The command's first arguments are groups of options, each as a dict; Typer sees each option as a parameter."""

    def decorate(command: Command) -> Command:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[len(groups) :]

        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(*[_given(group, values) for group in groups], **values)

        options = [_parameter(option) for group in groups for option in group]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*options, *own)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def _given(group: Sequence[Option], values: dict[str, Any]) -> Given:
    parsed = {option.name: _parsed(option, values.pop(option.name)) for option in group}
    return {name: value for name, value in parsed.items() if value is not None}


def _parameter(option: Option) -> inspect.Parameter:
    extra, default = option.extra, option.default
    names = extra.get("names") or ([f"--{option.name.replace('_', '-')}"] if option.kind is bool else [])
    kind: Any = str if option.kind is Literal or "parse" in extra else option.kind
    if kind in (tuple, dict):
        kind = list[str if kind is dict else option.entries[0].kind]  # type: ignore[misc]
    if default in (None, (), {}):
        kind, default = kind | None, None
    declared = typer.Option(
        *names,
        help=option.help + (" Repeatable." if option.kind in (tuple, dict) and "parse" not in extra else ""),
        metavar=extra.get("metavar"),
        rich_help_panel=extra.get("panel"),
        show_default=extra.get("shown", True),
    )
    default = inspect.Parameter.empty if default is REQUIRED else str(default) if kind is str else default
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared]
    )


def _parsed(option: Option, value: Any) -> Any:
    if value is None or (option.kind in (tuple, dict) and not value):
        return None
    if "parse" in option.extra:
        return option.extra["parse"](option.name, value)
    if option.kind is dict:
        return dict(_entry(option, text) for text in value)
    return tuple(value) if option.kind is tuple else value


def _entry(option: Option, text: str) -> tuple[int, float]:
    token, _, number = text.partition("=")
    try:
        return int(token), float(number)
    except ValueError as error:
        raise ParameterError(option.name, text, "ID=BIAS, as in 42=-5.5") from error
