"""A target's features for a trained head: a vector of its hidden states for each committed token.

position        0    1    2    3    4
token           a    b    c    d    e        e: the last committed one, the root
feature         A    B    C    D    -        the target has not run e yet
row of a head        A b  B c  C d  D e      the feature of the token before, and the token

A head beside its target reads features where they are: "feature" in its rows is then [1 + the slot], or [0] for zeros.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pilotfish.core.cache.slots import Slots

#: In place of a layer's id: the hidden state after the last layer and the final norm.
FINAL = -1
#: [tokens, width]; a row of NaN where it is not known.
Features: TypeAlias = NDArray[np.float32]
#: Reads features of tokens in slots of a target, which keep them as they keep KV: [slots, width].
FeatureSource: TypeAlias = Callable[[Slots], Features]


class FeatureLog:
    """One sequence's features on their way to the rows that need them, in order. A lost one's row goes without."""

    def __init__(self, width: int) -> None:
        self._none = np.full(width, np.nan, np.float32)
        self._rows: dict[int, NDArray[np.float32]] = {}  # by position, from `_first` on
        self._first = 0
        self._gap: int | None = None  # the first position whose feature a row went without
        self.reach = 0  # positions up to the last one whose feature came

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, first: int, rows: Features) -> None:
        skipped = max(self._first - first, 0)
        for position, row in enumerate(rows[skipped:], first + skipped):
            self._rows[position] = row.copy()  # without the others that came with it
        if len(rows) > skipped:
            self.reach = max(self.reach, first + len(rows))

    def of_rows(self, start: int, count: int) -> Features:
        """For the rows of tokens [start, start + count): the feature before each."""
        found = [self._rows.get(position, self._none) for position in range(start - 1, start - 1 + count)]
        return np.stack(found) if found else np.zeros((0, len(self._none)), np.float32)

    def forget(self, before: int) -> None:
        first = max(before - 1, self._first)
        for position in range(self._first, first):
            if self._rows.pop(position, None) is None and self._gap is None:
                self._gap = position
        self._first, self.reach = first, max(self.reach, first)

    def num_whole(self, count: int) -> int:
        """How many of the first `count` tokens, whose rows are computed, come before the first lost feature."""
        return count if self._gap is None else min(count, self._gap + 1)

    def restart(self, first: int) -> None:
        self._rows, self._first, self.reach = {}, first, first
        if self._gap is not None and self._gap >= first:
            self._gap = None
