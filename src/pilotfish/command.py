"""Commands whose options stand in dataclasses, so that several commands share them."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from typing import Any


def taking(*groups: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A command whose first arguments are instances of these dataclasses of options. Typer sees each of their
    fields as a parameter of the command, before the command's own."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[len(groups) :]
        fields = [list(inspect.signature(group, eval_str=True).parameters.values()) for group in groups]

        @functools.wraps(command)
        def run(**given: Any) -> None:
            chosen = [
                group(**{p.name: given.pop(p.name) for p in own_fields})
                for group, own_fields in zip(groups, fields, strict=True)
            ]
            command(*chosen, **given)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in itertools.chain(*fields, own)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate
