"""What each token of an output was for, however the output came."""

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.core.scheduling.executor import TokenLogprobs
from pilotfish.grammar.parsers.formats import TOOL_FORMATS
from pilotfish.grammar.parsers.grammars import Tool
from pilotfish.grammar.parsers.pieces import Arguments, CallBegin, Content, Piece, Reasoning, joined
from pilotfish.grammar.parsers.reasoning import REASONING_FORMATS, ReasoningParser
from pilotfish.server.answers.event_format import TokenBuffer
from pilotfish.server.bodies.params import TokenizedPrompt
from pilotfish.wire.serving import Delta, Finish

END = Finish("stop", None)
#: Tokens of an output; one that is empty ends within a character.
TOKENS = ["<think>", "\n", "I", " may", "", " ☃", "</think>", "\n\n", "Yes", ".", "\n<tool_", 'call>{"name": ']
TOKENS += ['"f", ', '"arg', 'uments": {"a"', ": 1}}", "</tool_call>", "", "Done"]


def output() -> TokenBuffer:
    inner = TOOL_FORMATS["hermes"].parser([Tool("f")])
    return TokenBuffer(0, TokenizedPrompt([1]), ReasoningParser(REASONING_FORMATS["qwen3"], inner, begins_inside=False))


def read(tokens: list[str], deltas: list[tuple[int, int]], *, text: str | None = None) -> TokenBuffer:
    """An output that comes as deltas, each of so many tokens and, for now, without its text's last characters."""
    whole, ends = "".join(tokens) if text is None else text, list(accumulate(map(len, tokens)))
    made, taken, told = output(), 0, 0
    for i, (count, held) in enumerate(deltas):
        last = i == len(deltas) - 1
        count = len(tokens) - taken if last else min(count, len(tokens) - taken)
        end = ends[taken + count - 1] if taken + count else 0
        until = len(whole) if last else max(told, min(end - held, len(whole)))
        scores = [TokenLogprobs(token, -1.0, 1, ()) for token in range(taken, taken + count)]
        numbers, until_then = [*range(taken, taken + count)], ends[taken : taken + count]
        finish = END if last else None
        made.read(Delta(1, 0, numbers, whole[told:until], until_then, [], logprobs=scores, finish=finish))
        taken, told = taken + count, until
    return made


def told(made: TokenBuffer) -> list[Any]:
    return [(joined(pieces), entry and entry.token) for pieces, entry in made.scored]


def text_of(pieces: list[Piece], kind: type[Any]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, kind))


def test_each_token() -> None:
    made = read(TOKENS, [(len(TOKENS), 0)])
    pieces = joined(made.pieces)
    assert [type(piece) for piece in pieces] == [Reasoning, Content, CallBegin, Arguments, Content]
    assert text_of(pieces, Reasoning) == "I may ☃" and text_of(pieces, Arguments) == '{"a": 1}'
    assert [entry for _, entry in told(made)] == [*range(len(TOKENS)), None]
    assert made.reasoning_tokens == TOKENS.index("</think>")  # and the mark that begins it


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=20))
def test_deltas_change_nothing(deltas: list[tuple[int, int]]) -> None:
    expected, made = read(TOKENS, [(len(TOKENS), 0)]), read(TOKENS, deltas)
    assert told(made) == told(expected) and made.reasoning_tokens == expected.reasoning_tokens
    assert joined(made.pieces) == joined(expected.pieces)


@pytest.mark.parametrize("size", range(len("".join(TOKENS))))
def test_a_text_that_a_stop_string_cut(size: int) -> None:
    """Tokens of what was cut off complete nothing."""
    text = "".join(TOKENS)[:size]
    made, steps = read(TOKENS, [(len(TOKENS), 0)], text=text), read(TOKENS, [(3, 2)] * 7, text=text)
    assert told(made) == told(steps) and len(made.scored) == len(TOKENS) + 1
    parser = output().parser
    assert joined(made.pieces) == joined(parser.feed(text) + parser.finish())


def test_without_log_probabilities() -> None:
    made = output()
    made.read(Delta(1, 0, [5, 6], "Hi", [1, 2], [], finish=END))
    assert joined(made.pieces) == [Content("Hi")] and all(entry is None for _, entry in made.scored)
