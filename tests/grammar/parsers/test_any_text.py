"""Whatever a model writes: nothing raises, no cut matters, no text is lost."""

from itertools import islice

import pytest
from cuts import calls_of, content_of, pairs_of_cuts, parse, single_cuts
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import OUTPUTS, TOOLS, Output
from sizes import sized

from pilotfish.grammar.parsers.formats import TOOL_FORMATS
from pilotfish.grammar.parsers.pieces import CallBegin, OutputParser, Piece, Reasoning, joined
from pilotfish.grammar.parsers.reasoning import REASONING_FORMATS, ReasoningParser

#: What calls are made of, whole and in parts; `word7` never is a part of one.
FRAGMENTS = {
    "hermes": ["<tool_call>", "</tool_call>", "<tool", "_call>", "</", "\n"],
    "llama3_json": ["<|python_tag|>", "<|", "python_tag|>", "; ", "\n"],
    "pythonic": [
        *("<|python_start|>", "<|python_end|>", "[ping(", "[get_weather(city=", ")]", ", ", "'", "\\u00", "'''", "**"),
    ],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_", "ping", "ping{"],
}
SHARED = [
    *'{}[]"\\:,=() é😀',
    *("word7", "\r\n", "1.5", "null", "True", "\\ud83d", '"name": ', '"arguments": ', '"parameters": ', '"ping"'),
    *('{"name": "ping"', '"arguments": {}}'),
    *('"{\\"a\\": 1}"', '{"name": "ping", "arguments": {"a": "}"}}'),
]


def parser(name: str) -> OutputParser:
    return TOOL_FORMATS[name].parser(TOOLS)


CASES = [pytest.param(name, one, id=f"{name}: {one.name}") for name, outputs in OUTPUTS.items() for one in outputs]
REASONINGS = {"hermes": REASONING_FORMATS["qwen3"], "mistral": REASONING_FORMATS["mistral"]}
THOUGHT = "I must\nlook."


@pytest.mark.parametrize(("name", "output"), CASES)
def test_what_a_recorded_output_says_and_no_cut_matters(name: str, output: Output) -> None:
    whole, pairs = parse(parser(name), [output.text]), pairs_of_cuts(output.text)
    assert calls_of(whole) == list(output.calls)
    assert content_of(whole) == output.content
    for parts in (list(output.text), *single_cuts(output.text), *islice(pairs, None, None, sized(41, 1))):
        assert parse(parser(name), parts) == whole, parts


@pytest.mark.parametrize(
    ("name", "output"),
    [(name, one) for name in REASONINGS for one in OUTPUTS[name] if one.calls and not one.name.startswith("cut")],
)
def test_all_is_told_with_the_last_delta_of_several_tokens(name: str, output: Output) -> None:
    """Other engines lost calls or arguments in such deltas: rtp-llm's pull requests 682 and 694, vLLM's issue 41967,
    SGLang's 31915."""
    text = f"{THOUGHT}{REASONINGS[name].end}{output.text}"
    said = [Reasoning(THOUGHT), *parse(parser(name), [output.text])]
    for parts in islice(pairs_of_cuts(text), None, None, sized(211, 7)):
        made, pieces = ReasoningParser(REASONINGS[name], parser(name), begins_inside=True), list[Piece]()
        for part in parts:
            pieces += made.feed(part)
        assert joined(pieces) == said and made.finish() == [], parts


def test_each_format_has_outputs() -> None:
    assert OUTPUTS.keys() == TOOL_FORMATS.keys()
    assert all(len(outputs) >= 12 for outputs in OUTPUTS.values())


@st.composite
def parts(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(max_examples=sized(25, 100), deadline=None)
@given(data=st.data())
def test_no_cut_of_any_text_matters(name: str, data: st.DataObject) -> None:
    known = [*FRAGMENTS[name], *SHARED, *(output.text for output in OUTPUTS[name])]
    text = "".join(data.draw(st.lists(st.sampled_from(known) | st.text(max_size=3), max_size=12)))
    pieces = parse(parser(name), [text])
    assert parse(parser(name), data.draw(parts(text))) == pieces
    assert parse(parser(name), list(text)) == pieces
    if not calls_of(pieces):
        assert content_of(pieces) == text


#: Around whole calls: no key of an object, and no quote, that could make a word a part of a call's form.
BETWEEN = ["word7", "{", "}", "[", "]", ",", ";", " ", "\n", "é", '{"name": "ping", "arguments": {"a": "word7"}}']


@pytest.mark.parametrize("name", TOOL_FORMATS)
@settings(max_examples=sized(25, 100), deadline=None)
@given(data=st.data())
def test_no_word_is_lost_or_told_twice(name: str, data: st.DataObject) -> None:
    fragments = [fragment for fragment in FRAGMENTS[name] if fragment not in ("[CALL_ID]", "[ping(")]
    whole = [output.text for output in OUTPUTS[name] if not output.name.startswith("cut")]
    text = "".join(data.draw(st.lists(st.sampled_from([*fragments, *BETWEEN, *whole]), max_size=12)))
    told = [piece.name if isinstance(piece, CallBegin) else piece.text for piece in parse(parser(name), [text])]
    assert "".join(told).count("word7") == text.count("word7")
