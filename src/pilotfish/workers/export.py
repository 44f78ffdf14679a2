"""KV out of a prefill worker's slots, as segments: layer by layer, while the forward that computes it runs on.

            layer    0   1   2   3   4   5
chunk 1     tokens   ═══════════════════════►      a segment: some layers of a chunk, or of a part of one
chunk 2     tokens   ══════════╪                   its forward runs: layers 0 to 2 are there
"""

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue

from pilotfish.core.cache.slots import Slots
from pilotfish.core.prefilling.prefill_machine import PrefillMachine
from pilotfish.core.prefilling.prefill_orders import PlacedSegment, TakenOrder
from pilotfish.core.prefilling.segments import LEAST_SEGMENT, KVLayout
from pilotfish.core.scheduling.executor import LayerProgress
from pilotfish.errors import EngineError, WireError
from pilotfish.kv.arena import Arena, Bytes, content
from pilotfish.kv.lanes import drained
from pilotfish.wire.channel import Received, decode_to_prefill, send_all

logger = logging.getLogger(__name__)

#: Bytes of a frame beside the tokens of a sequence as long as the worker's context, 5 each at most.
FRAME_BASE = 1 << 20


@dataclass(eq=False)
class SharedMachine:
    """A prefill worker's machine (prefill_machine.py) as its threads share it: a lock, a clock, an outbox."""

    machine: PrefillMachine
    post: Callable[..., None]  # sends frames to a peer; from any thread, without waiting
    clock: Callable[[], float] = time.perf_counter
    changed: Callable[[], None] = lambda: None  # called after each frame: there may be something to do
    observe_lease: Callable[[TakenOrder], None] = lambda _: None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._largest_frame = FRAME_BASE + 5 * self.machine.welcome.context

    @contextmanager
    def turn(self) -> Iterator[float]:
        with self._lock:
            yield self.clock()
            send_all(self.machine.outbox, self.post)
            for notice in self.machine.notices:
                logger.log(notice.level, "%s", notice.text)
            for order in self.machine.ended:
                self.observe_lease(order)
            self.machine.notices.clear()
            self.machine.ended.clear()

    def close(self) -> None:
        with self.turn() as now:
            self.machine.close(now)

    # -- the channel's thread

    def tick(self) -> None:
        with self.turn() as now:
            self.machine.tick(now)

    def receive(self, received: Received) -> None:
        """Decodes the frame before it takes the lock."""
        try:
            if len(received.frame) > self._largest_frame:
                context = self.machine.welcome.context
                raise WireError(f"frame: {len(received.frame)} bytes; a context of {context} needs fewer")
            message = decode_to_prefill(received.frame)
        except WireError as error:
            with self.turn():
                self.machine.malformed(received.peer, str(error))
            return
        with self.turn() as now:
            self.machine.receive(received.peer, message, now, received.tenant, received.weight)
        self.changed()


#: Seconds between two looks at how far a forward is, and between two where nothing is known to come.
SOON, LATER = 0.0005, 1.0


@dataclass(frozen=True)
class SegmentPart:
    layers: range
    tokens: range


def split(layout: KVLayout, tokens: int, segment_bytes: int) -> Iterator[SegmentPart]:
    """As many layers to a segment as make `LEAST_SEGMENT`, all tokens of a layer if they fit; features apart."""
    layer_bytes, count = tokens * layout.token_bytes, len(layout.of_kv)
    together, most = math.ceil(LEAST_SEGMENT / layer_bytes), max(segment_bytes // layer_bytes, 1)
    groups = _divided(count, max(count // together, math.ceil(count / most), 1))
    if layout.features:
        groups.append(range(count, layout.layers))
    for layers in groups:
        most_tokens = segment_bytes // layout.bytes_of(layers)
        for part in _divided(tokens, math.ceil(tokens / most_tokens)):
            yield SegmentPart(layers, part)


def _divided(count: int, parts: int) -> list[range]:
    return [range(i * count // parts, (i + 1) * count // parts) for i in range(parts)]


@dataclass(eq=False)
class Export:
    order: TakenOrder
    first: int  # token
    slots: Slots  # [tokens], which stay as they are until this is given back
    complete: bool = False  # whether its forward has ended
    parts: deque[SegmentPart] = field(default_factory=deque)  # that are left


@dataclass(eq=False)
class Exporter:
    """A thread that makes segments of exports, orders in turn; one that waits for layers or room holds up no other."""

    shared: SharedMachine
    memory: Arena
    read_layers: Callable[[Slots, range, Bytes], None]  # of slots [tokens], into [bytes of a segment]
    progress: LayerProgress
    clock: Callable[[], float] = time.perf_counter
    returned: Callable[[], None] = lambda: None  # called when an export is given back, and when the thread has failed

    def __post_init__(self) -> None:
        self._layout = self.shared.machine.welcome.identity.layout
        self._given = SimpleQueue[Export]()
        self._back = SimpleQueue[Export]()
        self._exports: dict[TakenOrder, deque[Export]] = {}
        self._wait = LATER
        self._event = threading.Event()
        self._closing = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="export", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, export: Export) -> None:
        """`take_back` returns it, exactly once."""
        export.parts.extend(split(self._layout, len(export.slots), self.memory.segment_bytes))
        self._given.put(export)
        self._event.set()

    def wake(self) -> None:
        self._event.set()

    def take_back(self) -> list[Export]:
        """Exports whose slots are read no more. EngineError once the thread has failed."""
        if self._failure is not None:
            raise EngineError(f"the exporting thread failed: {self._failure}") from self._failure
        return drained(self._back)

    def close(self) -> None:
        """No slot is read when this returns."""
        self._closing = True
        self._event.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing:
                if not self.turn():
                    self._event.wait(self._wait)
        except Exception as error:
            self._failure = error
            self.returned()

    def turn(self) -> bool:
        self._event.clear()
        self._wait = LATER
        for export in drained(self._given):
            self._exports.setdefault(export.order, deque()).append(export)
        return sum(self._advance(order) for order in list(self._exports)) > 0

    def _advance(self, order: TakenOrder) -> bool:
        export = self._exports[order][0]
        if not order.live:
            while order in self._exports:
                self._give_back(order)
            return True
        part = export.parts[0]
        if not export.complete and self.progress.at(self.clock()) < part.layers.stop:
            self._wait = SOON
            return False
        size = len(part.tokens) * self._layout.bytes_of(part.layers)
        place = self.memory.take(order.peer, size)
        if place is None:
            return False
        self._export(export, part, place)
        if order.live and not export.parts:
            self._give_back(order)
        return True

    def _give_back(self, order: TakenOrder) -> None:
        exports = self._exports[order]
        self._back.put(exports.popleft())
        if not exports:
            del self._exports[order]
        self.returned()

    def _export(self, export: Export, part: SegmentPart, place: int) -> None:
        try:
            placed = self._place(export, part, place)
        except Exception as error:
            logger.exception("KV could not be exported")
            self.memory.free(place)
            with self.shared.turn() as now:
                self.shared.machine.fail(export.order, f"KV could not be exported: {error}", now)
            return
        export.parts.popleft()
        with self.shared.turn() as now:
            if not self.shared.machine.segment_ready(export.order, placed, now):
                self.memory.free(place)

    def _place(self, export: Export, part: SegmentPart, place: int) -> PlacedSegment:
        layers, tokens, data = part.layers, part.tokens, self.memory.buffer(place)
        self.read_layers(export.slots[tokens.start : tokens.stop], layers, data)
        first, epoch = export.first + tokens.start, self.memory.epoch(place)
        return PlacedSegment(first, len(tokens), layers.start, len(layers), place, epoch, len(data), content(data.data))
