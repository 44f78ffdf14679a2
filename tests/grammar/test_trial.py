"""The process that tries grammars: ended by them, ended by others, and with its owner."""

import gc
import os
import signal

import pytest
from llguidance import LLMatcher
from support import descriptors

from pilotfish.grammar.trial import NOTHING, TOO_COMPLEX, WITHOUT_ROLLBACK, Special, Trial

SPECIAL = Special(600, {0: "<|end|>", 599: "<|call|>"}, [0])
GOOD = LLMatcher.grammar_from_regex("[ab]{3}")
#: Its remainders are counted one by one.
HANGS = LLMatcher.grammar_from_json_schema('{"type": "integer", "multipleOf": 99999989}')
#: As deep a recursion in compiling.
CRASHES = LLMatcher.grammar_from_lark("start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(6000)) + 'r6000: "a"')


def process_of(trial: Trial) -> int:
    assert trial._process is not None
    return trial._process.pid


@pytest.fixture(scope="module")
def trial() -> Trial:
    return Trial(SPECIAL)


def test_it_starts_when_it_is_needed_stays_and_ends_with_its_owner() -> None:
    trial = Trial(SPECIAL)
    assert trial._process is None
    assert trial.problem(GOOD) is None
    first = process_of(trial)
    assert trial.problem(GOOD) is None and process_of(trial) == first
    del trial
    gc.collect()
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


@pytest.mark.parametrize("grammar", [HANGS, CRASHES], ids=["hangs", "crashes"])
def test_what_ends_it_is_refused_and_the_next_is_tried(trial: Trial, grammar: str) -> None:
    assert trial.problem(GOOD) is None
    first, before = process_of(trial), descriptors()
    assert trial.problem(grammar) == TOO_COMPLEX and descriptors() == before - 2
    assert trial.problem(GOOD) is None and process_of(trial) != first and descriptors() == before


def test_one_that_others_ended_starts_again(trial: Trial) -> None:
    assert trial.problem(GOOD) is None
    before = descriptors()
    os.kill(process_of(trial), signal.SIGKILL)
    assert trial._process is not None
    trial._process.wait()
    assert trial.problem(GOOD) is None and descriptors() == before


@pytest.mark.parametrize(
    ("lark", "problem"),
    [
        ("start: <|call|> <[598]>", None),
        ("start: <|other|>", "unknown special token"),
        ("start: <[600]>", "600"),
        ("start: a\na: b\nb: a", "NoExtension"),
        ("start: a\na[max_tokens=3]: /b+/", WITHOUT_ROLLBACK),
    ],
)
def test_it_has_the_special_tokens_and_the_size_of_the_vocabulary(trial: Trial, lark: str, problem: str | None) -> None:
    found = trial.problem(LLMatcher.grammar_from_lark(lark))
    assert found is None if problem is None else problem in (found or "")


def test_a_language_without_texts(trial: Trial) -> None:
    found = trial.problem(
        LLMatcher.grammar_from_json_schema('{"const": "\\u0001"}', overrides={"json_allowed_escapes": "n"})
    )
    assert found is not None and (found == NOTHING or "NoExtension" in found)
