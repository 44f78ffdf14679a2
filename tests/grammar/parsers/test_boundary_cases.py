"""Several tokens at once, as speculation gives them: the deltas in which other engines lost calls or arguments.

The seven are those of alibaba/rtp-llm's pull requests 682 and 694; behind them, what vLLM's issue 41967 and SGLang's
31915 report.
"""

from __future__ import annotations

import pytest
from cuts import calls_of, content_of, parse, reasoning_of
from recorded import TOOLS

from pilotfish.grammar.parsers.formats import TOOL_FORMATS
from pilotfish.grammar.parsers.pieces import Arguments, CallBegin, OutputParser, Piece
from pilotfish.grammar.parsers.reasoning import REASONING_FORMATS, ReasoningParser

ROME, OSLO = ("get_weather", '{"city": "Rome"}'), ("get_weather", '{"city": "Oslo"}')
THOUGHT = "I must\nlook."

#: Deltas, content, calls. Each begins in the reasoning.
HERMES = {
    "1: the reasoning ends, content, a call begins": (
        [
            THOUGHT,
            "\n</think>\n\nWell: <tool_call>",
            '\n{"name": "get_weather", ',
            '"arguments": {"city": "Rome"}}\n</tool_call>',
        ],
        "Well: ",
        [ROME],
    ),
    "2: a call begins within a delta": (
        [
            THOUGHT,
            "\n</think>\n\n",
            '<tool_call>\n{"name": "get_weather", "arguments": {"ci',
            'ty": "Rome"}}\n</tool_call>',
        ],
        "",
        [ROME],
    ),
    "3: a call ends with its mark": (
        [
            THOUGHT,
            "</think>",
            "<tool_call>",
            '\n{"name": "get_weather", "arguments": {"city": ',
            '"Rome"}}\n</tool_call>',
        ],
        "",
        [ROME],
    ),
    "4: the end mark and content": (
        [
            THOUGHT,
            "</think>",
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}',
            "\n</tool_call>Done.",
        ],
        "Done.",
        [ROME],
    ),
    "5: a whole call": (
        [THOUGHT, "</think>", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'],
        "",
        [ROME],
    ),
    "6: several calls, the last one open": (
        [
            THOUGHT,
            "</think>So:\n<tool_call>\n"
            '{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n<tool_call>\n{"na',
            'me": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        ],
        "So:\n",
        [ROME, OSLO],
    ),
    "7: an end mark and a mark": (
        [
            THOUGHT,
            "</think>",
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n',
            "</tool_call><tool_call>",
            '\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        ],
        "",
        [ROME, OSLO],
    ),
    "the name and the first of the arguments": (
        [
            THOUGHT,
            "</think><tool_call>\n{",
            '"name": "get_weather", "arguments": {"',
            'city": "Rome"}}',
            "\n</tool_call>",
        ],
        "",
        [ROME],
    ),
    "a mark in many deltas": (
        [
            THOUGHT,
            "</th",
            "ink",
            "><tool",
            "_",
            "call",
            '>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</',
            "tool_call>",
        ],
        "",
        [ROME],
    ),
    "two whole calls in the last delta": (
        [
            THOUGHT,
            '</think><tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
        ],
        "",
        [ROME, OSLO],
    ),
}
MISTRAL = {
    "1: the reasoning ends, content, a call begins": (
        [THOUGHT, "[/THINK]Well: [TOOL_CALLS]", "get_weather", '[ARGS]{"city": "Rome"}'],
        "Well: ",
        [ROME],
    ),
    "2: a call begins within a delta": (
        [THOUGHT, "[/THINK]", '[TOOL_CALLS]get_weather[ARGS]{"ci', 'ty": "Rome"}'],
        "",
        [ROME],
    ),
    "3: a list ends": (
        [THOUGHT, "[/THINK]", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": ', '"Rome"}}]'],
        "",
        [ROME],
    ),
    "4: a list's end and content": (
        [THOUGHT, "[/THINK]", '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome"}', "}]Done."],
        "Done.",
        [ROME],
    ),
    "5: a whole call": ([THOUGHT, '[/THINK][TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}'], "", [ROME]),
    "6: several calls, the last one open": (
        [
            THOUGHT,
            '[/THINK]So:[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}[TOOL_CALLS]get_wea',
            'ther[ARGS]{"city": "Oslo"}',
        ],
        "So:",
        [ROME, OSLO],
    ),
    "7: the arguments' end and a mark": (
        [THOUGHT, '[/THINK][TOOL_CALLS]get_weather{"city": "Rome"', "}[TOOL_CALLS]", 'get_weather{"city": "Oslo"}'],
        "",
        [ROME, OSLO],
    ),
}
CASES = [
    pytest.param(tool_format, reasoning, *case, id=f"{tool_format} {name}")
    for tool_format, reasoning, cases in (("hermes", "qwen3", HERMES), ("mistral", "mistral", MISTRAL))
    for name, case in cases.items()
]


def parser(tool_format: str, reasoning: str) -> OutputParser:
    return ReasoningParser(REASONING_FORMATS[reasoning], TOOL_FORMATS[tool_format].parser(TOOLS), begins_inside=True)


@pytest.mark.parametrize(("tool_format", "reasoning", "deltas", "content", "calls"), CASES)
def test_no_call_and_no_argument_is_lost(
    tool_format: str, reasoning: str, deltas: list[str], content: str, calls: list[tuple[str, str]]
) -> None:
    pieces = parse(parser(tool_format, reasoning), deltas)
    assert (reasoning_of(pieces), content_of(pieces), calls_of(pieces)) == (THOUGHT, content, calls)
    assert pieces == parse(parser(tool_format, reasoning), ["".join(deltas)])


@pytest.mark.parametrize(("tool_format", "reasoning", "deltas", "content", "calls"), CASES)
def test_all_is_told_with_the_last_delta(
    tool_format: str, reasoning: str, deltas: list[str], content: str, calls: list[tuple[str, str]]
) -> None:
    made, pieces = parser(tool_format, reasoning), list[Piece]()
    for delta in deltas:
        pieces += made.feed(delta)
    assert (content_of(pieces), calls_of(pieces)) == (content, calls)
    assert made.finish() == []


def test_a_call_is_told_as_soon_as_its_name_is_known_and_arguments_as_they_come() -> None:
    made = TOOL_FORMATS["hermes"].parser(TOOLS)
    assert made.feed('<tool_call>\n{"name": "get_weather') == []
    assert made.feed('"') == [CallBegin(0, "get_weather")]
    assert made.feed(', "arguments": ') == []
    for sign in '{"city": "</tool_call>"}':
        assert made.feed(sign) == [Arguments(0, sign)]
    assert made.feed("}\n</tool_call>") == made.finish() == []
