"""The annotation of a dataclass's field declares an option: type, bounds and help text. Checks, command lines
(`pilotfish.command`) and schemas are derived from it."""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, replace
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from msgspec import Meta

from pilotfish.errors import ParameterError, UnknownOptionError

Options = TypeVar("Options")

#: Larger bounds are left out of a msgspec schema.
INT64_MAX = (1 << 63) - 1
#: Suffixes of whole numbers.
UNITS = {"": 1, "k": 10**3, "K": 1 << 10, "m": 10**6, "M": 1 << 20}
KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", tuple: "a list", dict: "a mapping"}
#: The default of an option that must be given.
REQUIRED: Any = ...


def option(
    help: str = "",
    low: float | None = None,
    high: float | None = None,
    *,
    above: float | None = None,
    most: int | None = None,
    **extra: Any,
) -> Meta:
    """`low` to `high`: inclusive bounds; `above`: an exclusive lower one; `most`: entries, or characters of a text.

    `extra`: `or_zero` allows 0 below `low`, `unit` is that of a number. For the command line: `names` and `panel` in
    the help, `metavar`, `shown` (the default in words), and `parse`, a function of the option's name and the text."""
    if isinstance(high, int) and high > INT64_MAX:
        extra["high"], high = high, None
    if "or_zero" in extra:
        extra["low"], low = low, 0
    bounds: Any = {"ge": low, "le": high, "gt": above, "max_length": most}
    return Meta(description=help or None, **bounds, extra=extra)


def count(field: str, text: str) -> int:
    """Reads 8192, 8k or 8K. ParameterError, naming `field`, for another text."""
    if (match := re.fullmatch(r"(\d{1,12})([kKmM]?)", text, re.ASCII)) is None:
        raise ParameterError(field, text, "a whole number, as in 8192, 8k (8000) or 8K (8192)")
    return int(match[1]) * UNITS[match[2]]


def separated(separator: str | None) -> Callable[[str, str], tuple[str, ...]]:
    return lambda _, text: tuple(text.split(separator))


def text(low: int, high: int) -> Meta:
    return Meta(min_length=low, max_length=high)


@dataclass(frozen=True)
class Option:
    name: str
    kind: Any  # a key of KINDS, Literal, or another type, of which any value is taken; None apart, see `optional`
    default: Any = REQUIRED
    help: str = ""
    low: float | None = None  # of a number, or of the length of a text, list or mapping
    high: float | None = None
    above: float | None = None  # as `low`, but not allowed itself
    optional: bool = False  # whether None is allowed
    choices: tuple[Any, ...] = ()  # of a Literal
    entries: "tuple[Option, ...]" = ()  # of a list: its items; of a mapping: its keys, its values
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def allowed(self) -> str:
        if self.kind is Literal:
            return " or ".join(self.choices)
        words = KINDS[self.kind] + (f" of {self.extra['unit']}," if "unit" in self.extra else "")
        if self.above is not None:
            return f"{words} more than {self.above:g} and at most {self.high}"
        if self.high is None:
            return words
        if self.kind in (tuple, dict):
            return f"{words} of at most {self.high}"
        zero = "0, or " if "or_zero" in self.extra else ""
        span = f"{self.low or 0} to {self.high}"
        return f"strings of {span} characters" if self.kind is str else f"{zero}{words} {span}"

    def check(self, value: Any) -> None:
        """ParameterError for a value that is not allowed."""
        if self.optional and value is None:
            return
        if not self._takes(value):
            raise ParameterError(self.name, value, self.allowed)
        parts = (value.keys(), value.values()) if self.kind is dict else (value,)
        for entry, part in zip(self.entries, parts, strict=False):
            for each in part:
                entry.check(each)

    def _takes(self, value: Any) -> bool:
        if self.kind is Literal:
            return value in self.choices
        if self.kind in (int, float):
            types = int | float if self.kind is float else int
            return isinstance(value, types) and not isinstance(value, bool) and self._within(value)
        if self.kind is str:
            return isinstance(value, str) and self._within(len(value)) and (self.high is None or is_text(value))
        if self.kind in (tuple, dict):
            return isinstance(value, (list, tuple) if self.kind is tuple else Mapping) and self._within(len(value))
        return self.kind is not bool or isinstance(value, bool)

    def _within(self, number: float) -> bool:
        if number == 0 and "or_zero" in self.extra:
            return True
        inside = (self.low is None or number >= self.low) and (self.high is None or number <= self.high)
        return inside and (self.above is None or number > self.above)


@functools.cache
def options_of(cls: type) -> Mapping[str, Option]:
    hints = get_type_hints(cls, include_extras=True)
    return {item.name: _declared(item.name, hints[item.name], _default(item)) for item in dataclasses.fields(cls)}


def _default(item: dataclasses.Field[Any]) -> Any:
    if item.default_factory is not MISSING:
        return item.default_factory()
    return REQUIRED if item.default is MISSING else item.default


def _declared(name: str, hint: Any, default: Any = REQUIRED) -> Option:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        (one,) = (argument for argument in arguments if argument is not NoneType)
        return replace(_declared(name, one, default), optional=True)
    if origin is Annotated:
        return _described(_declared(name, arguments[0], default), hint.__metadata__[0])
    if origin is Literal:
        return Option(name, Literal, default, choices=arguments)
    if origin is None:
        return Option(name, hint, default)
    kind = dict if issubclass(origin, Mapping) else tuple
    entries = tuple(_declared(name, argument) for argument in arguments if argument is not ...)
    return Option(name, kind, default, entries=entries)


def _described(plain: Option, meta: Meta) -> Option:
    extra = meta.extra or {}
    low = extra.get("low", meta.min_length if meta.ge is None else meta.ge)
    high = extra.get("high", meta.max_length if meta.le is None else meta.le)
    return replace(plain, help=meta.description or "", low=low, high=high, above=meta.gt, extra=extra)


def pick(cls: type, *names: str, without: Collection[str] = (), **defaults: Any) -> list[Option]:
    """The named fields, or all with a help text but `without`; `defaults` replaces their defaults."""
    declared = options_of(cls)
    chosen = names or [name for name, one in declared.items() if one.help and name not in without]
    return [replace(declared[name], default=defaults.get(name, declared[name].default)) for name in chosen]


def unset(options: Iterable[Option]) -> list[Option]:
    """The options without defaults: `taking` leaves out those that are not given."""
    return [replace(one, default=None) for one in options]


def check_options(options: Any) -> None:
    """ParameterError names the first field with a bad value."""
    cls: type = type(options)
    for name, declared in options_of(cls).items():
        declared.check(getattr(options, name))


def refuse_unknown(cls: type[Options]) -> type[Options]:
    """Decorates a dataclass: unknown keywords raise UnknownOptionError."""
    names = sorted(item.name for item in dataclasses.fields(cls))  # type: ignore[arg-type]
    init: Any = cls.__init__

    @functools.wraps(init)
    def checked(self: Options, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in names:
                raise UnknownOptionError(name, names)
        init(self, *args, **given)

    setattr(cls, "__init__", checked)  # noqa: B010  # mypy knows no assignment to it
    return cls


def is_text(value: str) -> bool:
    """Whether UTF-8 can hold it: half a surrogate pair, which JSON can spell, it cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
