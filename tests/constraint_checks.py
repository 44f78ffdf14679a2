"""Whether a text is what an entry of the corpus asks for, or may become it, judged without llguidance."""

import ast
import functools
import json
import re
from typing import Any

import jsonschema_rs
import regex
from grammar_corpus import Entry, Grammar, Regex, Schema
from pydantic_core import from_json


def is_valid(entry: Entry, text: str) -> bool:
    if isinstance(entry.source, Schema):
        return _is_json(text) and _validator(json.dumps(entry.source.schema)).is_valid(json.loads(text))
    pattern = _pattern(entry)
    matches = pattern is None or regex.fullmatch(pattern, text) is not None
    return matches and (not isinstance(entry.source, Grammar) or _can_be_read(entry.source.reader, text))


def may_become_valid(entry: Entry, text: str) -> bool:
    """Of JSON, and what only a reader knows, this judges the form alone."""
    if isinstance(entry.source, Schema) or (isinstance(entry.source, Grammar) and entry.source.reader == "json"):
        return _is_begun_json(text)
    pattern = _pattern(entry)
    return pattern is None or regex.fullmatch(pattern, text, partial=True) is not None


@functools.cache
def _validator(schema: str) -> Any:
    return jsonschema_rs.Draft202012Validator(json.loads(schema), validate_formats=True)


def _pattern(entry: Entry) -> str | None:
    source = entry.source
    if isinstance(source, Regex):
        return source.pattern
    assert isinstance(source, Grammar)
    pattern = source.regex
    for name, meaning in source.where.items() if pattern else ():
        pattern = re.sub(rf"(?<![A-Za-z]){name}(?![A-Za-z])", lambda _, meaning=meaning: meaning, pattern)
    return pattern


def _can_be_read(reader: str | None, text: str) -> bool:
    if reader == "json":
        return _is_json(text)
    if reader == "parentheses":
        return text[0] == "(" and text[-1] == ")" and text.count("(") == text.count(")") and "()" not in text
    if reader == "python":
        try:
            ast.parse(text)
        except SyntaxError:
            return False
    return True


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _is_begun_json(text: str) -> bool:
    try:
        from_json(f"[{text}", allow_partial=True)  # a part of a list's item may be anything that begins well
    except ValueError:
        return False
    return True
