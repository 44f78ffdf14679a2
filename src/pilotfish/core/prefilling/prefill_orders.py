"""Orders that a prefill worker has taken, and whose turn it is.

order    tokens   [ cached | computed | pending .............. ]
segments                 [ of tokens from `first` on, layer by layer, as soon as their KV is there ]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pilotfish.core.peers.fields import Peer
from pilotfish.core.peers.peer import GreetedTarget
from pilotfish.core.prefilling.segments import SegmentReference

#: How an order may end.
RELEASED, EXPIRED, FAILED, GONE = "released", "expired", "failed", "gone"


@dataclass(frozen=True)
class PlacedSegment:
    first: int  # token
    tokens: int
    layer: int
    layers: int
    place: int
    epoch: int
    size: int  # bytes
    content: int  # CRC-32


@dataclass(eq=False)
class TakenOrder:
    peer: Peer
    handover: int
    tokens: Sequence[int]
    sequence: bytes  # digest of the tokens
    first: int  # token that is handed over
    salt: str | None  # orders of different ones share no KV
    ordered: float
    expires: float  # its lease
    moved: float  # when a segment of it was last put somewhere, or taken
    exported: int  # tokens, the first ones, that are segments or are about to be, or that the target has
    pending: int  # tokens without KV
    unsent: int  # tokens without a segment, times layers
    started: float | None = None  # its first row
    computed: float | None = None  # its last
    ended: float | None = None
    cached: int = 0  # tokens whose KV was there
    segments: int = 0  # so far
    size: int = 0  # bytes of them
    held: dict[int, SegmentReference] = field(default_factory=dict)  # by number: those that the target has not taken
    fetched: set[int] = field(default_factory=set)
    outcome: str = ""  # of the words above; "": it lives

    @property
    def live(self) -> bool:
        return not self.outcome


@dataclass(eq=False)
class OrderingTarget(GreetedTarget):
    weight: float
    mac_key: bytes
    orders: dict[int, TakenOrder] = field(default_factory=dict)
    waiting: deque[TakenOrder] = field(default_factory=deque)
    clock: float = 0.0  # tokens over weight, of its orders whose turn has come

    @property
    def queued(self) -> int:
        return sum(len(order.tokens) for order in self.waiting)

    @property
    def begun(self) -> int:
        waiting = set(self.waiting)
        return sum(len(order.tokens) for order in self.orders.values() if order.unsent and order not in waiting)


class Turns:
    """Targets take turns by tokens over weight: the one with least is next. Idle ones save nothing up."""

    def __init__(self) -> None:
        self._now = 0.0  # clock of the target whose turn came last

    def join(self, target: OrderingTarget, order: TakenOrder) -> None:
        if not target.waiting:
            target.clock = max(target.clock, self._now)
        target.waiting.append(order)

    def next(self, targets: Iterable[OrderingTarget]) -> TakenOrder | None:
        target = min((one for one in targets if one.waiting), key=lambda one: one.clock, default=None)
        if target is None:
            return None
        order = target.waiting.popleft()
        self._now = target.clock
        target.clock += len(order.tokens) / target.weight
        return order
