"""A request's constraint, and the state that follows an output through its grammar.

output   { "name ─┬─ ": "  ─── A        every node has a state of its own, reached from its parent's:
                  └─ ": 5               illegal where the schema wants a text
"""

import json
from collections.abc import Callable, Mapping, Sequence
from math import log
from typing import Annotated, Any, Literal, Protocol

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from pilotfish.core.trees.tree import GRAMMAR, ROOT, Guesses
from pilotfish.errors import ParameterError

MAX_LENGTH = 1 << 18  # characters of a schema, an expression or a grammar
MAX_MARK = 64  # tokens of the end of a reasoning
WORD = 32  # bits of a mask's word

Bits = NDArray[np.int32]  # bit t % 32 of word t // 32 says whether token t may be given


class Constraint(Struct, frozen=True, omit_defaults=True):
    """JSON that a schema allows, text that a regular expression matches as a whole, or text that a grammar derives.
    ParameterError names `structured_outputs`."""

    kind: Literal["json_schema", "regex", "grammar"]
    text: Annotated[str, Meta(max_length=MAX_LENGTH)]  # a schema, Rust's regular expression, or Lark's or GBNF's EBNF
    compact: bool = False  # JSON without optional white space; otherwise a space, or a line's end and indent, may stand
    #: Tokens in the output after which it begins, as those that end a reasoning; none: at once.
    after: Annotated[list[Annotated[int, Meta(ge=0, lt=1 << 31)]], Meta(max_length=MAX_MARK)] = []
    #: The token with which a reasoning begins: where another comes first, it holds from there on.
    opening: Annotated[int, Meta(ge=0, lt=1 << 31)] | None = None

    @classmethod
    def json(cls, schema: Mapping[str, Any] | bool | str, *, compact: bool = False) -> "Constraint":
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
        return cls("json_schema", _bounded(text), compact)

    @classmethod
    def json_object(cls, *, compact: bool = False) -> "Constraint":
        return cls.json({"type": "object"}, compact=compact)

    @classmethod
    def regex(cls, pattern: str) -> "Constraint":
        return cls("regex", _bounded(pattern))

    @classmethod
    def grammar(cls, text: str) -> "Constraint":
        return cls("grammar", _bounded(text))

    @classmethod
    def choice(cls, texts: Sequence[str]) -> "Constraint":
        if not texts or not all(texts):
            raise ParameterError("structured_outputs", list(texts), "a choice of one or more texts that are not empty")
        quoted = " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)
        return cls("grammar", _bounded(f"start: TEXT\nTEXT: {quoted}"))  # a terminal: there may be thousands of texts


def _bounded(text: str) -> str:
    if not 0 < len(text) <= MAX_LENGTH:
        raise ParameterError("structured_outputs", f"{len(text)} characters", f"1 to {MAX_LENGTH}")
    return text


class GrammarState(Protocol):
    """Where an output stands in its grammar. A path holds tokens after the last `extend`; all but its last are
    legal. A call costs as many tokens as its path differs from the last call's. One thread at a time."""

    def extend(self, token: int) -> None:
        """`token` is output now."""

    @property
    def ended(self) -> bool:
        """Whether the output is whole and nothing can follow."""

    @property
    def problem(self) -> str | None:
        """The limit that was reached, after which it tells nothing."""

    def allows(self, path: Sequence[int]) -> bool:
        """Whether the path's last token is legal."""

    def forced(self, path: Sequence[int]) -> Sequence[int]:
        """The tokens of the only text that can follow, as the tokenizer writes it; none where there is a choice."""

    def mask(self, path: Sequence[int], bits: Bits) -> None:
        """Write which tokens may follow into `bits` [words]."""


#: Gives the state at the beginning of an output, the caller's own, once the grammar is compiled; None before that, and
#: for ever where it cannot be.
PendingGrammar = Callable[[], GrammarState | None]
GrammarSource = Callable[[Constraint], PendingGrammar]


class FollowedGrammar:
    """Does not wait for the grammar: once compiled, it catches up with the sequence."""

    def __init__(self, pending: PendingGrammar, output: Sequence[int]) -> None:
        self._pending = pending
        self._state: GrammarState | None = None
        self._missing = list(output)  # tokens that the state was not told of

    def extend(self, tokens: Sequence[int]) -> None:
        self._missing += tokens

    def state(self) -> GrammarState | None:
        """At the sequence's end; None until the grammar is compiled, and after a problem."""
        if self._state is None:
            self._state = self._pending()
        if self._state is not None:
            for token in self._missing:
                self._state.extend(token)
            self._missing.clear()
        return None if self._state is None or self._state.problem is not None else self._state


def no_grammars(_: Constraint) -> PendingGrammar:
    return lambda: None


class MaskedPaths(Struct, frozen=True):
    state: GrammarState
    paths: Sequence[Sequence[int]]  # [samples], the tokens before each


#: Begins to compute the masks of paths for so many tokens. Its result waits for them: [samples of all, words].
MaskMaker = Callable[[Sequence[MaskedPaths], int], Callable[[], Bits]]


def masks_when_asked(masked: Sequence[MaskedPaths], vocab_size: int) -> Callable[[], Bits]:
    def compute() -> Bits:
        bits = np.zeros((sum(len(one.paths) for one in masked), words(vocab_size)), np.int32)
        rows = iter(bits)
        for one in masked:
            for path in one.paths:
                one.state.mask(path, next(rows))
        return bits

    return compute


def words(vocab_size: int) -> int:
    return -(-vocab_size // WORD)


#: Log of the chance that the target writes a forced token in just this way. The bundled target did so for each of 3,570
#: tokens that were forced in 7,555 of JSON, at temperatures 0 and 1; others may now and then write it in other tokens.
FORCED = log(0.99)


def constrained(tree: Guesses, state: GrammarState, most: int) -> Guesses:
    kept, number, paths = Guesses(), {ROOT: ROOT}, {ROOT: list[int]()}
    nodes = zip(tree.parents, tree.tokens, tree.scores, tree.origins, strict=True)
    for node, (parent, token, score, origin) in enumerate(nodes):
        if parent in number and state.allows(path := [*paths[parent], token]):
            number[node] = kept.add(number[parent], token, score, origin)
            paths[node] = path
    parents = set(kept.parents)
    for node, place in number.items():
        if place not in parents:  # of a node with children the only continuation would be among them
            for token in state.forced(paths[node]):
                score = (0.0 if place == ROOT else kept.scores[place]) + FORCED
                place = kept.add(place, token, score, GRAMMAR)
    return kept.best(most)
