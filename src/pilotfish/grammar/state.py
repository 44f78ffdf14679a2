"""A matcher stands at one path of a token tree, and goes to another over their last common token: one step for each
node, where copies would cost the whole output each. Masks are computed by copies, which are dropped: llguidance (1.9.1)
keeps its last mask over a rollback, and may give it for another path.

    committed ───┬─ a ─┬─ b     from b to c: back one, on one
                 │     └─ c
                 └─ d           from c to d: back two, on one

A guess that reaches a limit changes no output: no guess is legal from then on, and a fresh matcher takes over."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from operator import eq

import numpy as np
from llguidance import LLMatcher

from pilotfish.core.sampling.constraint import WORD, Bits


@dataclass(frozen=True)
class MaskChain:
    """Masks at a place of a tree, then after each of some tokens.

    root ─┬─ a ─── b ─── c     two chains: of the root, a, b, c; and of d, e
          └─ d ─── e
    """

    matcher: LLMatcher  # which stands there; for this alone
    tokens: list[int]  # each after the one before; all are legal
    samples: list[list[int]]  # [tokens + 1], places in the list of paths


@dataclass(frozen=True)
class MaskPlan:
    """Nothing is allowed on paths without a mask."""

    free: list[int]  # places of paths before the grammar's beginning
    chains: list[MaskChain]
    opening: list[int]  # places where a reasoning may begin, by
    opening_token: int | None


class MatcherState:
    def __init__(self, compiled: LLMatcher, after: Sequence[int] = (), opening: int | None = None) -> None:
        """`compiled` is only copied. The grammar begins after `after`, or at a first token that is not `opening`."""
        self._compiled, self._matcher = compiled, compiled.deep_copy()
        self._mark = list(after)
        self._tail: list[int] = []  # newest output, shorter than the mark, while that has not come
        self._begun = not after
        self._opening = opening if after else None  # until there is output
        self._output: list[int] = []  # since it has begun
        self._path: list[int] = []  # where the matcher stands
        self._guesses = True  # whether any may be legal
        self.problem: str | None = None

    def extend(self, token: int) -> None:
        opening, self._opening = self._opening, None
        self._begun = self._begun or opening not in (None, token)
        if not self._begun:
            self._stand_at([])  # it may stand where a tree went on after the mark
            self._begun = self._begin([token]) is not None
            self._tail = [*self._tail, token][-len(self._mark) + 1 :] if len(self._mark) > 1 else []
        else:
            self._output.append(token)
            if not self._stand_at([token]):
                self._renew()
        self._path = []

    @property
    def ended(self) -> bool:
        return self._begun and self._stand_at([]) and self._matcher.is_stopped()

    def allows(self, path: Sequence[int]) -> bool:
        own = self._own(path)
        return own is None or self._reaches(own)

    def forced(self, path: Sequence[int]) -> Sequence[int]:
        own = self._own(path)
        if own is None or not self._guesses or not self._reaches(own) or self._may_open(path):
            return ()
        forced = self._matcher.compute_ff_tokens()
        taken = self._matcher.try_consume_tokens(forced) if forced else 0  # it may name what it does not take
        if self._matcher.is_error():
            self._guess_no_more()
            return ()
        if taken:
            self._matcher.rollback(taken)
        return forced[:taken]

    def mask(self, path: Sequence[int], bits: Bits) -> None:
        own = self._own(path)
        if own is None:
            bits[:] = -1
        elif not self._reaches(own):
            bits[:] = 0
        elif self._limit_of_mask(bits) is not None:
            self._guess_no_more()
            limit = None if path else self._limit_of_mask(bits)
            if limit is not None:
                self.fail(limit)
            if path or limit is not None:
                bits[:] = 0
        if self._may_open(path):
            allow(bits, self._opening)

    def _limit_of_mask(self, bits: Bits) -> str | None:
        """Writes the mask at the matcher's place; gives the limit that was reached."""
        matcher = self._matcher.deep_copy()
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return matcher.get_error() if matcher.is_error() else None

    def plan(self, paths: Sequence[Sequence[int]]) -> MaskPlan:
        free, samples = list[int](), defaultdict[tuple[int, ...], list[int]](list)
        for place, path in enumerate(paths):
            own = self._own(path)
            (free if own is None else samples[tuple(own)]).append(place)
        opening = [place for place, path in enumerate(paths) if self._may_open(path)]
        parts = (part for part in _chains_of(list(samples)) if self._reaches(part[0]))
        chains = [
            MaskChain(self._matcher.deep_copy(), [path[-1] for path in part[1:]], [samples[path] for path in part])
            for part in parts
        ]
        return MaskPlan(free, chains, opening, self._opening)

    def _may_open(self, path: Sequence[int]) -> bool:
        return self._opening is not None and not path

    def fail(self, reason: str) -> None:
        self.problem = self.problem or (reason.splitlines() or ["the grammar failed"])[0]

    def _own(self, path: Sequence[int]) -> Sequence[int] | None:
        if self._begun or (self._opening is not None and list(path[:1]) != [self._opening]):
            return path
        begin = self._begin(path)
        return None if begin is None else path[begin:]

    def _begin(self, path: Sequence[int]) -> int | None:
        size, text = len(self._mark), [*self._tail, *path]
        ends = range(max(size, len(self._tail) + 1), len(text) + 1)
        return next((end - len(self._tail) for end in ends if text[end - size : end] == self._mark), None)

    def _reaches(self, path: Sequence[int]) -> bool:
        if path and not self._guesses:
            return False
        reached = self._stand_at(path)
        if self.problem is None and self._matcher.is_error():
            self._guess_no_more()
            reached = not path and self.problem is None
        return reached

    def _guess_no_more(self) -> None:
        self._guesses = False
        self._renew()

    def _renew(self) -> None:
        if self.problem is not None:
            return
        self._matcher, self._path = self._compiled.deep_copy(), []
        taken = self._matcher.try_consume_tokens(self._output) if self._output else 0
        if self._matcher.is_error():
            self.fail(self._matcher.get_error())
        elif taken < len(self._output):
            self.fail(f"token {self._output[taken]} is not in the grammar")

    def _stand_at(self, path: Sequence[int]) -> bool:
        """False where the path is not legal, a limit was reached, or there is a problem."""
        if self.problem is not None or self._matcher.is_error():
            return False
        shared = sum(takewhile(bool, map(eq, self._path, path)))
        back, onward = len(self._path) - shared, list(path[shared:])
        if back:
            self._matcher.rollback(back)
        taken = self._matcher.try_consume_tokens(onward) if onward else 0
        self._path = [*path[:shared], *onward[:taken]]
        return taken == len(onward) and not self._matcher.is_error()


def allow(bits: Bits, token: int | None) -> None:
    if token is not None:
        bits[..., token // WORD] |= np.array(1 << token % WORD, np.uint32).view(np.int32)


def _chains_of(paths: Sequence[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
    """Splits paths into chains, in which each path extends the one before by a token."""
    below = defaultdict[tuple[int, ...], list[tuple[int, ...]]](list)
    known = set(paths)
    for path in paths:
        if path and path[:-1] in known:
            below[path[:-1]].append(path)
    starts = [path for path in paths if not path or path[:-1] not in known]
    while starts:
        chain = [starts.pop()]
        while following := below[chain[-1]]:
            first, *others = following
            chain.append(first)
            starts += others
        yield chain
