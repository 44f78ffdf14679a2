"""Prompt lookup: what followed the last n tokens the time before (Saxena 2023; free, and good at copying)."""

import math
from collections.abc import Sequence

from pilotfish.core.drafting.drafter import Drafter, DraftLimits
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.tree import NGRAM, Guesses

#: Chance, guessed, that a continuation's next token is right after a match of the key's length.
CONFIDENCE = {1: 0.1, 2: 0.3, 3: 0.6, 4: 0.8}


class NgramIndex:
    """Where each n-gram of a growing sequence last ended, for n from `min_n` to `max_n`."""

    def __init__(self, max_n: int, min_n: int = 1) -> None:
        self.max_n = max_n
        self.min_n = min_n
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def update(self, tokens: Sequence[int]) -> None:
        for end in range(max(self._indexed, 1), len(tokens)):
            for n in range(self.min_n, min(self.max_n, end) + 1):
                self._ends[tuple(tokens[end - n : end])] = end
        self._indexed = max(self._indexed, len(tokens))

    def lookup(self, tokens: Sequence[int]) -> tuple[int, int] | None:
        """(n, index of the token that followed) for the longest suffix seen before."""
        for n in range(min(self.max_n, len(tokens) - 1), self.min_n - 1, -1):
            end = self._ends.get(tuple(tokens[-n:]))
            if end is not None:
                return n, end
        return None


class NgramDrafter(Drafter):
    def __init__(self, max_n: int = max(CONFIDENCE), min_n: int = 1) -> None:
        self.max_n = max_n
        self.min_n = min_n
        self._indexes: dict[int, NgramIndex] = {}

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[Guesses]:
        return [self._tree(request, limits.nodes) for request in requests]

    def _tree(self, request: Request, nodes: int) -> Guesses:
        index = self._indexes.setdefault(request.id, NgramIndex(self.max_n, self.min_n))
        index.update(request.tokens)
        found = index.lookup(request.tokens)
        if found is None:
            return Guesses()
        n, start = found
        tokens = request.tokens[start : start + nodes]
        confidence = math.log(CONFIDENCE[min(n, max(CONFIDENCE))])
        return Guesses.chain(tokens, [confidence * (place + 1) for place in range(len(tokens))], NGRAM)

    def close(self, request: Request) -> None:
        self._indexes.pop(request.id, None)
