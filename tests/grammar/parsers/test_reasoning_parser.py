"""Reasoning before an answer."""

from itertools import islice

import pytest
from cuts import pairs_of_cuts, parse
from sizes import sized

from pilotfish.grammar.parsers.formats import TOOL_FORMATS
from pilotfish.grammar.parsers.pieces import Arguments, CallBegin, Content, ContentParser, Piece, Reasoning
from pilotfish.grammar.parsers.reasoning import REASONING_FORMATS, ReasoningParser, reasoning_format_of

THINK = REASONING_FORMATS["qwen3"]
MISTRAL = REASONING_FORMATS["mistral"]
CALL = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'

CASES = {
    "as Qwen writes it": ("<think>\nA < B,\n\nC.\n</think>\n\nIt is C.", False, "A < B,\n\nC.", [Content("It is C.")]),
    "begun by the prompt": ("A </thin B.\n</think>\n\nC", True, "A </thin B.", [Content("C")]),
    "begun by both": ("<think>A</think>B", True, "A", [Content("B")]),
    "none": ("A <think> B </think>", False, "", [Content("A <think> B </think>")]),
    "line ends and no reasoning": ("\n\n<thin", False, "", [Content("\n\n<thin")]),
    "empty": ("<think>\n\n</think>\n\nA", False, "", [Content("A")]),
    "cut": ("A\n\n</thi", True, "A\n\n</thi", []),
    "cut at a line's end": ("<think>A\r\n", False, "A\r\n", []),
    "nothing behind it": ("<think>A</think>\n", False, "A", []),
    "the mark again": ("<think>A</think>B</think>\r\n<think>C", False, "A", [Content("B</think>\r\n<think>C")]),
    "a call": (f"A {CALL} B\n</think>\n\n{CALL}", True, f"A {CALL} B", [CallBegin(0, "ping"), Arguments(0, "{}")]),
    "nothing": ("", True, "", []),
}


def parser(*, begins_inside: bool) -> ReasoningParser:
    return ReasoningParser(THINK, TOOL_FORMATS["hermes"].parser([]), begins_inside)


@pytest.mark.parametrize(("text", "begins_inside", "reasoning", "rest"), CASES.values(), ids=CASES)
def test_no_pair_of_cuts_matters(text: str, begins_inside: bool, reasoning: str, rest: list[Piece]) -> None:
    whole = parse(parser(begins_inside=begins_inside), [text])
    assert whole == [Reasoning(reasoning)] * bool(reasoning) + rest
    for parts in islice(pairs_of_cuts(text), None, None, sized(29, 1)):
        assert parse(parser(begins_inside=begins_inside), parts) == whole, parts


def test_mistral_marks() -> None:
    made = ReasoningParser(MISTRAL, ContentParser(), begins_inside=False)
    assert parse(made, ["[THINK]a [1]", "[/THI", "NK]b"]) == [Reasoning("a [1]"), Content("b")]


def test_no_more_is_held_back_than_may_be_a_mark() -> None:
    made = parser(begins_inside=True)
    assert made.feed("We see <b") == [Reasoning("We see <b")]
    assert made.feed("> and </th") == [Reasoning("> and ")]
    assert made.feed("e end>\n") == [Reasoning("</the end>")]
    assert made.feed("\n.") == [Reasoning("\n\n.")]
    assert made.feed("</think>\nYes") == [Content("Yes")]


@pytest.mark.parametrize(
    ("prompt", "inside"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<｜Assistant｜><think>", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
    ],
)
def test_a_prompt_may_begin_the_reasoning(prompt: str, inside: bool) -> None:
    assert THINK.begins_inside(prompt) is inside


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if '</think>' in content %}{{ '<|im_start|>assistant\n<think>' }}", "qwen3"),
        ("{% if '</think>' in content %}{{'<｜Assistant｜><think>\\n'}}{% endif %}", "deepseek_r1"),
        ("{{ '[THINK]' + chunk.thinking + '[/THINK]' }}", "mistral"),
        ("{{ '<seed:think>' + message.reasoning_content + '</seed:think>' }}", "seed_oss"),
        ("{{ messages[0].content }}", None),
        (None, None),
    ],
)
def test_a_template_shows_its_format(template: str | None, name: str | None) -> None:
    assert reasoning_format_of(template) == name
    assert name is None or name in REASONING_FORMATS
