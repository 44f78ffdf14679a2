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
def test_it_says(name: str, output: Output) -> None:
    pieces = parse(parser(name), [output.text])
    assert calls_of(pieces) == list(output.calls)
    assert content_of(pieces) == output.content


@pytest.mark.parametrize(("name", "output"), CASES)
def test_no_cut_matters(name: str, output: Output) -> None:
    whole = parse(parser(name), [output.text])
    assert parse(parser(name), list(output.text)) == whole
    for parts in single_cuts(output.text):
        assert parse(parser(name), parts) == whole, parts


@pytest.mark.parametrize(("name", "output"), CASES)
def test_no_pair_of_cuts_matters(name: str, output: Output) -> None:
    whole = parse(parser(name), [output.text])
    for parts in islice(pairs_of_cuts(output.text), None, None, sized(11, 1)):
        assert parse(parser(name), parts) == whole, parts


def test_each_format_has_outputs() -> None:
    assert OUTPUTS.keys() == TOOL_FORMATS.keys()
    assert all(len(outputs) >= 12 for outputs in OUTPUTS.values())
