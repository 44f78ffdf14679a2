"""The bundled pair's tokenizer and its grammars, made when a test first asks for them."""

from collections.abc import Sequence
from contextlib import closing
from functools import cache
from typing import Any
from unittest import mock

from llguidance import LLMatcher
from transformers import AutoTokenizer

from pilotfish.core.sampling.constraint import Constraint
from pilotfish.engine.pairs import resolve_pair
from pilotfish.grammar import trial
from pilotfish.grammar.compile import Grammars
from pilotfish.grammar.state import MatcherState

VOCAB, EOS = 4100, 0  # of a model whose vocabulary is padded
#: After some of them a step reaches a limit, which is lower for this grammar than for others: it costs less then.
AMBIGUOUS = Constraint.grammar('start: start start | "a"')


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resolve_pair("pycode").target)


@cache
def grammars() -> Grammars:
    return new_grammars()


@cache
def ambiguous() -> LLMatcher:
    with closing(new_grammars()) as made, mock.patch.dict(trial.LIMITS, max_items_in_row=160):
        return made.compile(AMBIGUOUS)


def new_grammars(eos_ids: Sequence[int] = (EOS,)) -> Grammars:
    return Grammars(tokenizer(), VOCAB, eos_ids)


def ids(text: str) -> list[int]:
    tokens: list[int] = tokenizer().encode(text, add_special_tokens=False)
    return tokens


def state_at(committed: Sequence[int], constraint: Constraint, after: Sequence[int] = ()) -> MatcherState:
    compiled = ambiguous() if constraint is AMBIGUOUS else grammars().compile(constraint)
    state = MatcherState(compiled, after)
    for token in committed:
        state.extend(token)
    return state


def accepts(constraint: Constraint, text: str) -> bool:
    matcher, tokens = grammars().compile(constraint).deep_copy(), ids(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())
