"""For heads that compute all depths below a root in one forward."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

import numpy as np
import torch
from torch import Tensor

from pilotfish.core.cache.slots import Slots
from pilotfish.core.scheduling.executor import NO_SAMPLING, Sampling, SequenceRows
from pilotfish.model.heads.executor import HeadLogits

#: Roots whose states of all slots are kept; those of others are computed again.
ROOTS = 256
_NONE: Mapping[int, Tensor] = MappingProxyType({})


@dataclass(frozen=True)
class KeptRow:
    prefix: Slots  # of the sequence up to the root
    depth: int  # 0: the root
    token: int

    @property
    def root(self) -> int:
        return int(self.prefix[-1])


def kept_rows(rows: SequenceRows) -> list[KeptRow]:
    roots = [KeptRow(rows.prefix_slots[: rows.start + offset + 1], 0, rows.tokens[offset]) for offset in rows.kept]
    nodes = zip(rows.nodes.depths.tolist(), rows.nodes.tokens.tolist(), strict=True)
    return [*roots, *(KeptRow(rows.prefix_slots, depth, token) for depth, token in nodes)]


class RootStates:
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
        for slot in slots:
            self._states.pop(slot, None)


#: States [slots, hidden] and, of nodes, on the host, int64 [nodes] each, the place of its state and its token; who may
#: draw at once -> what comes after.
SlotLogits = Callable[[Tensor, Tensor, Tensor, Sampling], HeadLogits]


class RootSlots:
    def __init__(
        self,
        compute: Callable[[Sequence[KeptRow]], Tensor],
        logits: SlotLogits,
        padded: Callable[[int], int],
        slots: int,
        first: int,
    ) -> None:
        """`compute` gives states of roots, [roots, slots, hidden]; the slot `first` gives the token after a root.
        `padded` maps a number of rows to that of the product with the output layer."""
        self._compute, self._logits, self._padded = compute, logits, padded
        self._slots, self._first = slots, first
        self._states = RootStates(ROOTS)  # [slots, hidden] each
        self.forget = self._states.forget

    def below(self, kept: Sequence[KeptRow], sampling: Sampling, fresh: Mapping[int, Tensor] = _NONE) -> HeadLogits:
        """Rows of one root and depth share their product. `fresh`: states [slots, hidden] of known roots, by slot."""
        states = self._states_of(kept, fresh)  # [roots, slots, hidden]
        slots = np.array([row.depth for row in kept]) + self._first
        beyond = slots >= self._slots
        places = np.unique([row.root for row in kept], return_inverse=True)[1] * self._slots
        distinct, which = np.unique(places + np.where(beyond, 0, slots), return_inverse=True)
        distinct = np.pad(distinct, (0, self._padded(len(distinct)) - len(distinct)))
        tokens = np.array([row.token for row in kept], np.int64)
        wanted, of_rows, ids = (torch.from_numpy(x) for x in (distinct, which, tokens))
        states = states.flatten(0, 1).index_select(0, wanted.to(states.device))
        logits = self._logits(states, of_rows, ids, NO_SAMPLING if beyond.any() else sampling)
        if beyond.any():  # nobody draws from NaN
            logits.values[torch.from_numpy(beyond).to(states.device)] = torch.nan
        return logits

    def _states_of(self, kept: Sequence[KeptRow], fresh: Mapping[int, Tensor]) -> Tensor:
        roots = {row.root: row for row in kept}
        states = {root: fresh[root] if root in fresh else self._states.get(root) for root in sorted(roots)}
        missing = [root for root, state in states.items() if state is None]
        computed = self._compute([roots[root] for root in missing]).unbind() if missing else ()
        for root, state in (*fresh.items(), *zip(missing, computed, strict=True)):
            states[root] = state
            self._states.put(root, state.clone())  # without the others of the forward
        return torch.stack(cast(list[Tensor], list(states.values())))
