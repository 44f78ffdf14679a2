"""What parameters do to logits depends on the row's own path, and on nothing else."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.core.sampling.logit_rules import LogitEdits, LogitRules, check_token_ids
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import Request
from pilotfish.errors import ParameterError

VOCAB = 6
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=8)
NO_STOPS: frozenset[int] = frozenset()


def rules(prompt: list[int], stop_ids: frozenset[int] = NO_STOPS, bad: Any = (), **params: Any) -> LogitRules:
    found = LogitRules.of(SamplingParams(**params), prompt, stop_ids, bad)
    assert found is not None
    return found


def of_history(edits: LogitEdits) -> dict[int, int]:
    assert edits.seen is not None
    return dict(zip(edits.seen.tokens.tolist(), edits.seen.counts.tolist(), strict=True))


@given(prompt=TOKENS, output=TOKENS, path=TOKENS)
def test_counts_are_those_of_output_and_path(prompt: list[int], output: list[int], path: list[int]) -> None:
    own = rules(prompt, repetition_penalty=1.5)
    own.edits(path)  # nothing that it keeps of them outlives an output
    own.extend(output)
    counted = of_history(own.edits(path))
    assert counted == {t: output.count(t) for t in {*prompt, *output}}
    assert own.edits(path).seen is own.edits([]).seen
    assert own.edits(path).seen.new(path) == {t: path.count(t) for t in {*path} - {*prompt, *output}}


@given(prompt=TOKENS, output=TOKENS, path=TOKENS, bad=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=3)))
def test_bad_sequences_never_come(prompt: list[int], output: list[int], path: list[int], bad: list[list[int]]) -> None:
    found = LogitRules.of(SamplingParams(), prompt, NO_STOPS, bad)
    if found is None:
        assert not bad
        return
    found.extend(output)
    history = prompt + output + path
    expected = {s[-1] for s in bad if [*history, s[-1]][-len(s) :] == s}
    assert set(found.edits(path).excluded.tolist()) == expected


@pytest.mark.parametrize(("output", "path", "excluded"), [(0, 0, True), (1, 1, True), (2, 1, False), (0, 3, False)])
def test_nothing_ends_an_output_before_min_tokens(output: int, path: int, excluded: bool) -> None:
    own = rules([1, 2], frozenset({5, 4}), min_tokens=3)
    own.extend([0] * output)
    assert own.edits([0] * path).excluded.tolist() == ([4, 5] if excluded else [])


def test_idle_parameters_need_no_rules() -> None:
    for params in ({}, {"temperature": 0.0, "top_k": 3}, {"min_tokens": 4}, {"logprobs": 3}):
        assert LogitRules.of(SamplingParams(**params), [1], NO_STOPS) is None


def test_a_request_extends_its_rules_by_what_it_commits() -> None:
    request = Request(0, [1], SamplingParams(presence_penalty=1.0, max_tokens=2), 0, NO_STOPS, 100)
    request.extend([3, 3, 3])  # the third is beyond max_tokens
    edits = request.rules.edits([])
    assert edits is not None
    assert of_history(edits) == {1: 0, 3: 2}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("logit_bias", {6: 1.0}), ("allowed_token_ids", (6,)), ("bad_token_ids", (7,))),
        *(("stop_token_ids", (6,)), ("allowed_token_ids", ()), ("bad_token_ids", tuple(range(6)))),
    ],
)
def test_impossible_token_ids_are_refused(field: str, value: Any) -> None:
    with pytest.raises(ParameterError, match=field):
        check_token_ids(SamplingParams(**{field: value}), NO_STOPS, (), VOCAB)


def test_rules_that_could_leave_nothing_are_refused() -> None:
    with pytest.raises(ParameterError, match="allowed_token_ids"):
        check_token_ids(SamplingParams(allowed_token_ids=(5, 3), min_tokens=2), frozenset({5}), [[1, 3]], VOCAB)
    check_token_ids(SamplingParams(allowed_token_ids=(5, 3), min_tokens=2), frozenset({5}), [], VOCAB)
    check_token_ids(SamplingParams(allowed_token_ids=(5, 3)), frozenset({5, 3}), [], VOCAB)
