"""Orders that a prefill worker has taken, and the targets that they are of.

order    tokens   [ cached | computed | pending .............. ]
segments                 [ of tokens from `first` on, layer by layer, as soon as their KV is there ]
"""

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from pilotfish.core.peers.fields import Peer
from pilotfish.core.peers.peer import GreetedTarget
from pilotfish.core.prefilling.prefill_messages import PrefillOrder
from pilotfish.core.prefilling.segments import SegmentReference, sequence_digest


class OrderEnding(StrEnum):
    """How an order may end."""

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


class TakenOrder:
    def __init__(
        self, peer: Peer, message: PrefillOrder, salt: str | None, layers: int, now: float, expires: float
    ) -> None:
        """Orders of different salts share no KV."""
        self.peer, self.handover, self.salt = peer, message.handover, salt
        self.tokens, self.sequence = message.tokens, sequence_digest(message.tokens)
        self.first = message.first  # token that is handed over
        self.ordered = now
        self.expires = expires  # its lease
        self.moved = now  # when a segment of it was last put somewhere, or taken
        self.exported = message.first  # tokens, the first ones, that are segments or soon, or that the target has
        self.pending = len(message.tokens)  # without KV
        self.unsent = (len(message.tokens) - message.first) * layers  # tokens without a segment, times layers
        self.started: float | None = None  # its first row
        self.computed: float | None = None  # its last
        self.ended: float | None = None
        self.cached = 0  # tokens whose KV was there
        self.segments, self.size = 0, 0  # so far, and their bytes
        self.held: dict[int, SegmentReference] = {}  # by number: those that the target has not taken
        self.fetched: set[int] = set()
        self.outcome = ""  # an OrderEnding; "": it lives

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
