"""msgspec converts and refuses; its messages are not parsed. The bad field is found by walking the type."""

import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, cast, get_args, get_origin

import msgspec
from msgspec import Struct

from pilotfish.errors import ParameterError
from pilotfish.printable import short

Converted = TypeVar("Converted")
#: Types in JSON's words.
_WORDS: dict[Any, str] = {str: "text", int: "an integer", float: "a number", bool: "true or false", NoneType: "null"}


def converted(path: str, value: Any, kind: type[Converted]) -> Converted:
    """ParameterError names the first bad field below `path`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _blame(path, value, kind) from error


def parsed_toml(
    page: str, text: str, kind: type[Converted], faults: Callable[[Converted], Iterable[tuple[str, object, str]]]
) -> Converted:
    """ParameterError names docs/`page`.md, or the first of `faults`: a field, its value, what is allowed."""
    try:
        parsed = msgspec.convert(tomllib.loads(text), kind)
    except tomllib.TOMLDecodeError as error:
        raise ParameterError(page, None, f"TOML ({error})") from error
    except msgspec.ValidationError as error:
        raise ParameterError(page, None, f"what docs/{page}.md says: {error}") from error
    for fault in faults(parsed):
        raise ParameterError(*fault)
    return parsed


def refused(field: str, problem: str) -> ParameterError:
    return ParameterError.described(field, f"{field}: {problem}")


def not_allowed(field: str, value: object, allowed: str) -> ParameterError:
    return refused(field, f"{short(value)} is not allowed; expected {allowed}")


def _blame(path: str, value: Any, kind: Any) -> ParameterError:
    for inner_path, inner_value, inner_kind in _parts(path, value, kind):
        if inner_value is msgspec.UNSET:
            return refused(inner_path, "it is missing")
        if inner_kind is None:
            return refused(inner_path, "there is no such parameter")
        if not _fits(inner_value, inner_kind):
            return _blame(inner_path, inner_value, inner_kind)
    return not_allowed(path or "body", value, _allowed(kind))


def _fits(value: Any, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def _parts(path: str, value: Any, kind: Any) -> Iterator[tuple[str, Any, Any]]:
    """Path, value and type of each part. UNSET: a missing value; None: the type of an unknown name."""
    options = options_of(kind)
    for option in options:
        if isinstance(value, list | tuple) and get_origin(option) in (list, Sequence):
            i = _first_misfit(value, option)
            yield f"{path}[{i}]", value[i], get_args(option)[0]
    if isinstance(value, dict):
        prefix = f"{path}." if path else ""
        for name, item, inner_kind in _fields(value, [option for option in options if is_struct(option)]):
            yield prefix + name, item, inner_kind


def is_struct(option: Any) -> bool:
    return isinstance(option, type) and issubclass(option, Struct)


def _fields(value: dict[str, Any], structs: list[type[Struct]]) -> Iterator[tuple[str, Any, Any]]:
    """Expected and actual fields. Of tagged structs only the one named by the tag counts, after the tag."""
    if structs and (tag := structs[0].__struct_config__.tag_field):
        tags = tuple(struct.__struct_config__.tag for struct in structs)
        yield tag, value.get(tag, msgspec.UNSET), cast(Any, Literal)[tags]
    if (struct := struct_of(value, structs)) is not None:
        known = types_of(struct)
        for name, item in value.items():
            yield name, item, known.get(name)
        missing = (field for field in msgspec.structs.fields(struct) if field.required and field.name not in value)
        yield from ((field.name, msgspec.UNSET, field.type) for field in missing)


def struct_of(value: dict[str, Any], structs: Sequence[type[Struct]]) -> type[Struct] | None:
    """The one that an object is to be: of tagged ones the one that it names."""
    tag = structs[0].__struct_config__.tag_field if structs else None
    return next((one for one in structs if tag is None or one.__struct_config__.tag == value.get(tag)), None)


@cache
def types_of(struct: type[Struct]) -> dict[str, Any]:
    tag = struct.__struct_config__.tag_field
    return {field.name: field.type for field in msgspec.structs.fields(struct)} | ({tag: Any} if tag else {})


def _first_misfit(items: Sequence[Any], kind: Any) -> int:
    """Index of the first bad item, by bisection: a body may hold millions."""
    low, high = 0, len(items)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _fits(items[low:middle], kind) else (low, middle)
    return low


@cache
def options_of(kind: Any) -> tuple[Any, ...]:
    if get_origin(kind) is Annotated:
        return options_of(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return tuple(option for each in get_args(kind) for option in options_of(each))
    return (kind,)


def _allowed(kind: Any) -> str:
    origin = get_origin(kind) or kind
    if origin is Annotated:
        return str(get_args(kind)[1].description)
    if origin in (Union, UnionType):
        return " or ".join(_allowed(each) for each in get_args(kind) if each is not NoneType)
    if origin is Literal:
        *first, last = get_args(kind)
        return f"{', '.join(first)} or {last}" if first else str(last)
    return "a list" if origin in (list, Sequence) else _WORDS.get(origin, "an object")
