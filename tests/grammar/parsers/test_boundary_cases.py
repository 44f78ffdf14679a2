"""Several tokens at once, as speculation gives them: the deltas in which other engines lost calls or arguments.

The seven are those of alibaba/rtp-llm's pull requests 682 and 694; behind them, what vLLM's issue 41967 and SGLang's
31915 report.
"""

from __future__ import annotations

import pytest
from cuts import calls_of, content_of, parse, reasoning_of
from recorded import TOOLS

from pilotfish.grammar.parsers.formats import TOOL_FORMATS
from pilotfish.grammar.parsers.pieces import Arguments, CallBegin, OutputParser, Piece, joined
from pilotfish.grammar.parsers.reasoning import REASONING_FORMATS, ReasoningParser

ROME, OSLO = ("get_weather", '{"city": "Rome"}'), ("get_weather", '{"city": "Oslo"}')
THOUGHT = "I must\nlook."
#: What models write as a call, and as its mark.
CALL, MARK = '{"name": "get_weather", "arguments": {"city": "Rome"}}', "<tool_call>\n"
AFTER = CALL.replace("Rome", "Oslo")

#: Content, calls, and the output behind the reasoning, cut at each ¦.
HERMES = {
    "1: the reasoning ends, content, a call begins": (
        "Well: ",
        [ROME],
        '\n</think>\n\nWell: <tool_call>¦\n{"name": "get_weather", ¦"arguments": {"city": "Rome"}}\n</tool_call>',
    ),
    "2: a call begins within a delta": (
        "",
        [ROME],
        '\n</think>\n\n¦<tool_call>\n{"name": "get_weather", "arguments": {"ci¦ty": "Rome"}}\n</tool_call>',
    ),
    "3: a call ends with its mark": (
        "",
        [ROME],
        '</think>¦<tool_call>¦\n{"name": "get_weather", "arguments": {"city": ¦"Rome"}}\n</tool_call>',
    ),
    "4: the end mark and content": ("Done.", [ROME], f"</think>¦{MARK}{CALL}¦\n</tool_call>Done."),
    "5: a whole call": ("", [ROME], f"</think>¦{MARK}{CALL}\n</tool_call>"),
    "6: several calls, the last one open": (
        "So:\n",
        [ROME, OSLO],
        f"</think>So:\n{MARK}{CALL}\n</tool_call>\n{MARK}{AFTER[:4]}¦{AFTER[4:]}\n</tool_call>",
    ),
    "7: an end mark and a mark": (
        "",
        [ROME, OSLO],
        f"</think>¦{MARK}{CALL}\n¦</tool_call><tool_call>¦\n{AFTER}\n</tool_call>",
    ),
    "the name and the first of the arguments": (
        "",
        [ROME],
        '</think><tool_call>\n{¦"name": "get_weather", "arguments": {"¦city": "Rome"}}¦\n</tool_call>',
    ),
    "a mark in many deltas": ("", [ROME], f"</th¦ink¦><tool¦_¦call¦>\n{CALL}\n</¦tool_call>"),
    "two whole calls in the last delta": (
        "",
        [ROME, OSLO],
        f"</think>{MARK}{CALL}\n</tool_call>\n{MARK}{AFTER}\n</tool_call>",
    ),
}
MISTRAL = {
    "1: the reasoning ends, content, a call begins": (
        "Well: ",
        [ROME],
        '[/THINK]Well: [TOOL_CALLS]¦get_weather¦[ARGS]{"city": "Rome"}',
    ),
    "2: a call begins within a delta": ("", [ROME], '[/THINK]¦[TOOL_CALLS]get_weather[ARGS]{"ci¦ty": "Rome"}'),
    "3: a list ends": ("", [ROME], f"[/THINK]¦[TOOL_CALLS][{CALL[:-8]}¦{CALL[-8:]}]"),
    "4: a list's end and content": ("Done.", [ROME], f"[/THINK]¦[TOOL_CALLS][{CALL[:-1]}¦{CALL[-1:]}]Done."),
    "5: a whole call": ("", [ROME], '[/THINK][TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}'),
    "6: several calls, the last one open": (
        "So:",
        [ROME, OSLO],
        '[/THINK]So:[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}[TOOL_CALLS]get_wea¦ther[ARGS]{"city": "Oslo"}',
    ),
    "7: the arguments' end and a mark": (
        "",
        [ROME, OSLO],
        '[/THINK][TOOL_CALLS]get_weather{"city": "Rome"¦}[TOOL_CALLS]¦get_weather{"city": "Oslo"}',
    ),
}
CASES = [
    pytest.param(tool_format, reasoning, *case, id=f"{tool_format} {name}")
    for tool_format, reasoning, cases in (("hermes", "qwen3", HERMES), ("mistral", "mistral", MISTRAL))
    for name, case in cases.items()
]


def parser(tool_format: str, reasoning: str) -> OutputParser:
    return ReasoningParser(REASONING_FORMATS[reasoning], TOOL_FORMATS[tool_format].parser(TOOLS), begins_inside=True)


@pytest.mark.parametrize(("tool_format", "reasoning", "content", "calls", "text"), CASES)
def test_no_call_and_no_argument_is_lost_and_all_is_told_with_the_last_delta(
    tool_format: str, reasoning: str, content: str, calls: list[tuple[str, str]], text: str
) -> None:
    made, deltas, pieces = parser(tool_format, reasoning), [THOUGHT, *text.split("¦")], list[Piece]()
    for delta in deltas:
        pieces += made.feed(delta)
    assert (reasoning_of(pieces), content_of(pieces), calls_of(pieces)) == (THOUGHT, content, calls)
    assert made.finish() == []
    assert joined(pieces) == parse(parser(tool_format, reasoning), ["".join(deltas)])


def test_a_call_is_told_as_soon_as_its_name_is_known_and_arguments_as_they_come() -> None:
    made = TOOL_FORMATS["hermes"].parser(TOOLS)
    assert made.feed('<tool_call>\n{"name": "get_weather') == []
    assert made.feed('"') == [CallBegin(0, "get_weather")]
    assert made.feed(', "arguments": ') == []
    for sign in '{"city": "</tool_call>"}':
        assert made.feed(sign) == [Arguments(0, sign)]
    assert made.feed("}\n</tool_call>") == made.finish() == []
