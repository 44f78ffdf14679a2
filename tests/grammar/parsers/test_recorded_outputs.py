"""Recorded outputs, cut at every boundary and every two."""

from __future__ import annotations

from itertools import islice

import pytest
from cuts import calls_of, content_of, pairs_of_cuts, parse, single_cuts
from recorded import OUTPUTS, TOOLS, Output
from sizes import sized

from pilotfish.grammar.parsers.formats import TOOL_FORMATS
from pilotfish.grammar.parsers.pieces import OutputParser

CASES = [
    pytest.param(name, output, id=f"{name}: {output.name}") for name, outputs in OUTPUTS.items() for output in outputs
]


def parser(name: str) -> OutputParser:
    return TOOL_FORMATS[name].parser(TOOLS)


@pytest.mark.parametrize(("name", "output"), CASES)
def test_what_it_says_and_no_cut_matters(name: str, output: Output) -> None:
    whole, pairs = parse(parser(name), [output.text]), pairs_of_cuts(output.text)
    assert calls_of(whole) == list(output.calls)
    assert content_of(whole) == output.content
    for parts in (list(output.text), *single_cuts(output.text), *islice(pairs, None, None, sized(41, 1))):
        assert parse(parser(name), parts) == whole, parts


def test_each_format_has_outputs() -> None:
    assert OUTPUTS.keys() == TOOL_FORMATS.keys()
    assert all(len(outputs) >= 12 for outputs in OUTPUTS.values())
