"""What a head computed at the roots of trees, for the nodes below them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from pilotfish.core.executor import SequenceRows
from pilotfish.core.slots import Slots


@dataclass(frozen=True)
class KeptRow:
    """A root, or a node below it, whose children are wanted."""

    prefix: Slots  # of the sequence up to the root
    depth: int  # 0: the root
    token: int

    @property
    def root(self) -> int:
        """The slot of the root."""
        return int(self.prefix[-1])


def kept_rows(rows: SequenceRows) -> list[KeptRow]:
    """In the order of `core.executor.Executor`."""
    roots = [KeptRow(rows.prefix_slots[: rows.start + offset + 1], 0, rows.tokens[offset]) for offset in rows.kept]
    nodes = zip(rows.nodes.depths.tolist(), rows.nodes.tokens.tolist(), strict=True)
    return [*roots, *(KeptRow(rows.prefix_slots, depth, token) for depth, token in nodes)]


class RootStates:
    """States of the roots that were asked for last, each by its slot."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._states: OrderedDict[int, Tensor] = OrderedDict()

    def get(self, slot: int) -> Tensor | None:
        if slot in self._states:
            self._states.move_to_end(slot)
        return self._states.get(slot)

    def put(self, slot: int, state: Tensor) -> None:
        self._states[slot] = state
        if len(self._states) > self._limit:
            self._states.popitem(last=False)

    def forget(self, slots: Iterable[int]) -> None:
        """Other tokens are in these slots now."""
        for slot in slots:
            self._states.pop(slot, None)
