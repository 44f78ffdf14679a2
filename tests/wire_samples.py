"""Messages made of their types alone: every struct of the wire, with a hostile text in each place where text can be.

The types are asked for their fields, so that a field which is added is covered.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import inspect

HOSTILE = "owned\x1b[31m\x1b]0;owned\x07\r\n\x08\x7f\x9b2J\u202e\u2028forged"


def kinds(union: Any) -> list[type[msgspec.Struct]]:
    """The messages of a union."""
    found = inspect.type_info(union)
    assert isinstance(found, inspect.UnionType)
    return [kind.cls for kind in found.types if isinstance(kind, inspect.StructType)]


def hostile_messages(kind: type[msgspec.Struct], **fixed: Any) -> Iterator[tuple[str, bytes]]:
    """The place of a text and a message that is plain but for it. `fixed` are top-level values."""
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.StructType)
    whole = _plain_struct(found) | fixed
    for field in found.fields:
        for place, value in _hostile(field.type):
            if field.encode_name not in fixed:
                yield f"{field.encode_name}{place}", msgspec.msgpack.encode({**whole, field.encode_name: value})


def mistyped_messages(kind: type[msgspec.Struct]) -> Iterator[tuple[str, bytes]]:
    """Frames that do not decode, and whose complaint may quote what they hold."""
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.StructType)
    whole = _plain_struct(found)
    for name in whole:
        yield name, msgspec.msgpack.encode({**whole, name: HOSTILE if not isinstance(whole[name], str) else 5})
        yield name, msgspec.msgpack.encode({**whole, name: {HOSTILE: HOSTILE}})
        yield name, msgspec.msgpack.encode({**whole, name: [HOSTILE]})
    yield "type", msgspec.msgpack.encode({**whole, "type": HOSTILE})


def _plain(kind: inspect.Type) -> Any:
    match kind:
        case inspect.IntType():
            return kind.ge if kind.ge is not None else 1
        case inspect.FloatType():
            return 0.0
        case inspect.BoolType():
            return False
        case inspect.StrType():
            return "plain"
        case inspect.BytesType():
            return bytes(kind.min_length or 0)
        case inspect.NoneType() | inspect.AnyType():
            return None
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.EnumType():
            return next(iter(kind.cls)).value
        case inspect.ListType() | inspect.VarTupleType():
            return [_plain(kind.item_type)] * (kind.min_length or 0)
        case inspect.TupleType():
            return [_plain(one) for one in kind.item_types]
        case inspect.DictType():
            return {}
        case inspect.UnionType():
            return _plain(kind.types[0])
        case inspect.StructType() | inspect.DataclassType():
            return _plain_struct(kind)
    raise AssertionError(f"what is a plain {kind}?")


def _plain_struct(kind: inspect.StructType | inspect.DataclassType) -> dict[str, Any]:
    tag = {"type": kind.tag} if isinstance(kind, inspect.StructType) and kind.tag is not None else {}
    return tag | {field.encode_name: _plain(field.type) for field in kind.fields if field.required}


def _hostile(kind: inspect.Type) -> Iterator[tuple[str, Any]]:
    """Values with one hostile text each, and where it is."""
    match kind:
        case inspect.StrType() | inspect.EnumType() | inspect.LiteralType():
            yield "", HOSTILE
        case inspect.ListType() | inspect.VarTupleType():
            yield from ((f"[]{place}", [value]) for place, value in _hostile(kind.item_type))
        case inspect.TupleType():
            plain = [_plain(one) for one in kind.item_types]
            for i, one in enumerate(kind.item_types):
                yield from ((f"[{i}]{place}", [*plain[:i], value, *plain[i + 1 :]]) for place, value in _hostile(one))
        case inspect.DictType():
            yield from ((f" key{place}", {value: _plain(kind.value_type)}) for place, value in _hostile(kind.key_type))
            key = _plain(kind.key_type)
            yield from ((f" value{place}", {key: value}) for place, value in _hostile(kind.value_type))
        case inspect.UnionType():
            for one in kind.types:
                yield from _hostile(one)
        case inspect.StructType() | inspect.DataclassType():
            fields = _plain_struct(kind)
            for field in kind.fields:
                for place, value in _hostile(field.type):
                    yield f".{field.encode_name}{place}", {**fields, field.encode_name: value}


def assert_nothing_raw(records: Sequence[logging.LogRecord], printed: str) -> None:
    """Neither in the log, whoever formats it, nor in what was printed."""
    for record in records:
        assert record.getMessage().isprintable(), record.getMessage()
        assert all("owned" not in line or line.isprintable() for line in logging.Formatter().format(record).split("\n"))
    for line in printed.split("\n"):
        assert line.isprintable(), line
