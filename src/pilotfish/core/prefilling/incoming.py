"""A hand-over under way at its target: segments announced, and segments in the slots.

            first ........................... end
layer 0     [ in slots | announced |            ]     segments of a layer come in the order of their tokens
layer 1     [ in slots |                        ]     count: tokens that are in the slots in every layer
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from pilotfish.core.prefilling.handover import HandOver
from pilotfish.core.prefilling.prefill_messages import OrderDone
from pilotfish.core.prefilling.prefill_pools import PrefillPool
from pilotfish.core.prefilling.segments import SegmentReference, sequence_digest


class Landing(NamedTuple):
    at: float
    seconds: float  # of work on the segment


@dataclass(eq=False)
class Incoming:
    number: int
    handover: HandOver
    pool: PrefillPool
    began: float
    deadline: float
    expected: float  # seconds until its first segment, as far as is known
    cached: int = 0  # tokens whose KV the pool is believed to have
    outcome: str = ""  # why it ends; "": it goes on
    ended: bool = False
    done: OrderDone | None = None
    complete_at: float = 0.0  # when the last of its tokens was in its slots
    segments: int = 0  # announced
    awaited: dict[int, SegmentReference] = field(default_factory=dict)  # by number: announced, not in slots
    landings: list[Landing] = field(default_factory=list)
    received: set[int] = field(default_factory=set)  # of those, which were fetched
    announced: list[int] = field(init=False)  # tokens, by layer
    ready: int = 0  # tokens that were announced in every layer

    def __post_init__(self) -> None:
        assert self.pool.welcome is not None  # or it would not be asked
        self.layout = self.pool.welcome.identity.layout  # of the pool's segments
        self.moved = self.began  # when something of it last came
        self.announced = [0] * self.layout.layers
        self._layout_digest = self.layout.digest()
        self._sequence = sequence_digest(self.handover.tokens)
        self._left = len(self.handover.slots) * self.layout.layers  # tokens that are to be announced, of all layers

    @property
    def announced_all(self) -> bool:
        return not self._left

    @property
    def complete(self) -> bool:
        return self.announced_all and not self.awaited

    @property
    def count(self) -> int:
        counts = list(self.announced)
        for reference in self.awaited.values():
            for layer in range(reference.layer, reference.layer + reference.layers):
                counts[layer] = min(counts[layer], reference.first - self.handover.first)
        return min(counts)

    @property
    def hidden(self) -> float:
        """After its end: seconds of work on segments that landed before the pool computed its last row."""
        report = self.handover.report
        computed = report.began + report.queued + report.computing
        return sum(one.seconds for one in self.landings if one.at <= computed) if report.told else 0.0

    @property
    def outstanding(self) -> int:
        computed = max(self.cached, self.handover.first + self.ready if self.ready else 0)
        return len(self.handover.tokens) - computed

    def announce(self, reference: SegmentReference) -> str | None:
        """Take the next segment; why it must not be read, in a word, or None."""
        if reference.layout != self._layout_digest:
            return "layout"
        if reference.sequence != self._sequence:
            return "tokens"
        if not self._in_range(reference):
            return "out_of_range"
        layers = slice(reference.layer, reference.layer + reference.layers)
        first = reference.first - self.handover.first
        if reference.number != self.segments or set(self.announced[layers]) != {first}:
            return "unexpected"
        self.announced[layers] = [first + reference.tokens] * reference.layers
        self.ready = min(self.announced)
        self.awaited[reference.number] = reference
        self.segments += 1
        self._left -= reference.tokens * reference.layers
        return None

    def _in_range(self, reference: SegmentReference) -> bool:
        end, layers = reference.first + reference.tokens, range(reference.layer, reference.layer + reference.layers)
        if reference.first < self.handover.first or end > len(self.handover.tokens) or layers.stop > self.layout.layers:
            return False
        return reference.size == reference.tokens * self.layout.bytes_of(layers)
