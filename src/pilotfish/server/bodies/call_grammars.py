"""Grammars of calls beside something else: Lark's texts whose rule `start` derives calls, with another one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pilotfish.grammar.parsers.grammars import json_of


def calls_or_json(calls: str, schema: Mapping[str, Any]) -> str:
    return f"start: some_calls | answer\n{_renamed(calls)}answer: {json_of(schema)}\n"


def text_and_calls(calls: str, mark: str) -> str:
    """A text, then calls, either or both. `mark`, with which calls begin, is a token of the model: it ends a text."""
    own = re.escape(mark)
    return f"start: TEXT? some_calls?\nTEXT: /(?s:.+)/ & ~/(?s:.*){own}(?s:.*)/\n{_renamed(calls)}"


def _renamed(calls: str) -> str:
    return calls.replace("start:", "some_calls:", 1)
