"""A prefill worker's machine (prefill_machine.py) as its threads share it: a lock, a clock, an outbox."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pilotfish.core.prefilling.prefill_machine import PrefillMachine
from pilotfish.core.prefilling.prefill_orders import TakenOrder
from pilotfish.errors import WireError
from pilotfish.wire.channel import Received, decode_to_prefill, send_all

logger = logging.getLogger(__name__)

#: Bytes of a frame beside the tokens of a sequence as long as the worker's context, 5 each at most.
FRAME_BASE = 1 << 20


@dataclass(eq=False)
class SharedMachine:
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
