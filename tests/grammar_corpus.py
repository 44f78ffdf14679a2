"""Constraints of many kinds, each with texts that it allows and some that it does not. Strings and lists are bounded:
most outputs of any model end."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from pilotfish.core.sampling.constraint import Constraint


class Schema(Struct, frozen=True):
    """Instances have their properties in the schema's order."""

    schema: Mapping[str, Any]
    valid: Sequence[Any]
    invalid: Sequence[Any]


class Regex(Struct, frozen=True):
    pattern: str
    valid: Sequence[str]
    invalid: Sequence[str]


class Grammar(Struct, frozen=True):
    """Its texts are those of `regex`; where a reader is named, `regex` matches some others too."""

    grammar: str
    valid: Sequence[str]
    invalid: Sequence[str]
    regex: str | None = None
    where: Mapping[str, str] = {}  # names that `regex` uses
    reader: Literal["json", "python", "parentheses"] | None = None


@dataclass(frozen=True)
class Entry:
    name: str
    source: Schema | Regex | Grammar

    @property
    def constraint(self) -> Constraint:
        if isinstance(self.source, Schema):
            return Constraint.json(self.source.schema)
        if isinstance(self.source, Regex):
            return Constraint.regex(self.source.pattern)
        return Constraint.grammar(self.source.grammar)

    @property
    def valid(self) -> list[str]:
        return self._texts(self.source.valid)

    @property
    def invalid(self) -> list[str]:
        return self._texts(self.source.invalid)

    def _texts(self, instances: Sequence[Any]) -> list[str]:
        if not isinstance(self.source, Schema):
            return list(instances)
        return [json.dumps(instance, ensure_ascii=False) for instance in instances]


def entries() -> Iterator[Entry]:
    """All of them: schemas, then regular expressions, then grammars."""
    for name, schema in msgspec.json.decode(_read("schemas.json"), type=dict[str, Schema]).items():
        yield Entry(name, schema)
    for name, regex in msgspec.toml.decode(_read("regexes.toml"), type=dict[str, Regex]).items():
        yield Entry(name, regex)
    for name, grammar in msgspec.toml.decode(_read("grammars.toml"), type=dict[str, Grammar]).items():
        yield Entry(name, grammar)


def _read(name: str) -> bytes:
    return Path(__file__).parent.joinpath("grammar", "corpus", name).read_bytes()
