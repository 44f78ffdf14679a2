"""The prefill worker's loop: orders become requests of a scheduler, whose KV is exported while it is computed.

channel's thread   PrefillHello, PrefillOrder, Renewal, Taken, Fetch … ─► machine ─► answers
loop               machine ─► next order ─► plan, forward, commit      one forward after another
exporting thread   slots of the forward at hand ─► segments ─► machine ─► SegmentReady
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from pilotfish.core.cache.slots import SlotPool, Slots
from pilotfish.core.prefilling.prefill_orders import TakenOrder
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import Executor, LayerProgress, Outcome
from pilotfish.core.scheduling.request import FinishReason, Request
from pilotfish.core.scheduling.scheduler import Scheduler
from pilotfish.core.scheduling.step import Step
from pilotfish.core.trees.tree import Forest, Guesses
from pilotfish.kv.lanes import drained
from pilotfish.workers.export import Export, Exporter, SharedMachine
from pilotfish.workers.records import PrefillRecord

logger = logging.getLogger(__name__)

#: Seconds that a forward may take, by measurement: an order that has ended is computed no longer than that. Rows that
#: it has all the same if that many are wanted, and before anything is measured.
LONGEST, LEAST_ROWS, FIRST_ROWS = 0.5, 128, 256
IDLE = 1.0  # seconds that the loop sleeps at most where nothing is to be done
#: An order samples one token, which is not used: it ends the request.
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


@dataclass(eq=False)
class PrefillWorker:
    shared: SharedMachine
    scheduler: Scheduler
    executor: Executor
    exporter: Exporter
    progress: LayerProgress  # counted by `executor`, and read by `exporter`
    clock: Callable[[], float] = time.perf_counter
    observe: Callable[[PrefillRecord], None] = lambda _: None

    def __post_init__(self) -> None:
        self._max_rows = self.scheduler.max_rows
        self._stopping = False
        self._events = SimpleQueue[None]()
        self._orders: dict[int, TakenOrder] = {}  # by the number of their request
        self._held = HeldSlots(self.scheduler.pool)
        self._next = 0
        self.shared.changed = self._wake_all
        self.exporter.returned = self.wake

    def run(self) -> None:
        busy = True
        while not self._stopping:
            busy = self.turn(0.0 if busy else IDLE)

    def stop(self) -> None:
        """From any thread, or a signal's handler."""
        self._stopping = True
        self.wake()

    def wake(self) -> None:
        self._events.put(None)

    def _wake_all(self) -> None:
        self.wake()
        self.exporter.wake()

    def turn(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for something to do, and run a forward; whether there was one."""
        drained(self._events, timeout)
        self._take_back()
        self._drop_ended()
        self._take_orders()
        return self._forward()

    def _take_back(self) -> None:
        for export in self.exporter.take_back():
            self._held.exported(export.order)
        computing = set(self._orders.values())
        for order in self._held.done():
            if order not in computing or not order.live:
                self._held.let_go(order)

    def _drop_ended(self) -> None:
        requests = {request.id: request for request in (*self.scheduler.running, *self.scheduler.waiting)}
        for number in [number for number, order in self._orders.items() if not order.live]:
            self._drop(requests[number])

    def _drop(self, request: Request) -> None:
        """Its order has ended. Slots it holds go first, so that what the cache keeps of it has no owner."""
        self._held.let_go(self._orders.pop(request.id))
        self.scheduler.abort(request)

    def _take_orders(self) -> None:
        """As many as fill a forward: more would only divide its rows."""
        machine = self.shared.machine
        in_time = max(int(LONGEST / machine.token_seconds), LEAST_ROWS) if machine.token_seconds else FIRST_ROWS
        self.scheduler.max_rows = max(min(in_time, self._max_rows), len(self._orders))
        while self._wanted_rows() < self.scheduler.max_rows and len(self._orders) < self.scheduler.max_requests:
            with self.shared.turn():
                machine.free_slots = self.scheduler.pool.num_available
                order = machine.next_order()
            if order is None:
                return
            self._orders[self._next] = order
            asked = (self._next, order.tokens, ONE_TOKEN, 0, frozenset[int]())
            self.scheduler.add(Request(*asked, room=1, cache_salt=order.salt, max_nodes=0))
            self._next += 1

    def _wanted_rows(self) -> int:
        return sum(request.num_pending for request in (*self.scheduler.running, *self.scheduler.waiting))

    def _forward(self) -> bool:
        chunks = self.scheduler.plan().chunks
        if not chunks:
            return False
        no_trees = Forest.of([Guesses() for chunk in chunks if chunk.complete])
        step = self.scheduler.schedule(chunks, no_trees, 0)
        began = self.clock()
        exports = self._export(step)
        try:
            self.scheduler.commit(step, self._execute(step, exports).tokens)
        except Exception as error:
            self._fail(step, error)
        else:
            self._advance(step, began)
        return True

    def _execute(self, step: Step, exports: Sequence[Export]) -> Outcome:
        try:
            outcome = self.executor.execute(step.rows(), step.sampling())
        except BaseException:
            self.scheduler.cancel(step)
            raise
        finally:
            self.progress.reset()  # before the exporter may look at the next forward
        for export in exports:
            export.complete = True
        self.exporter.wake()
        return outcome

    def _export(self, step: Step) -> list[Export]:
        exports = list[Export]()
        for chunk, slots in zip(step.chunks, step.slots, strict=True):
            order, computed = self._orders[chunk.request.id], chunk.request.num_computed
            if order.started is None:
                with self.shared.turn() as now:
                    self.shared.machine.started(order, computed, now)
            self._put(order, 0, chunk.request.slots[:computed], complete=True)
            exports += self._put(order, computed, slots, complete=False)
        return exports

    def _put(self, order: TakenOrder, first: int, slots: Slots, *, complete: bool) -> list[Export]:
        """From token `first` on, if not exported before: a preempted request comes to the same tokens again."""
        skipped = max(order.exported - first, 0)
        if skipped >= len(slots):
            return []
        export = Export(order, first + skipped, slots[skipped:].copy(), complete)
        order.exported = first + len(slots)
        self._held.export(order, export.slots)
        self.exporter.put(export)
        return [export]

    def _advance(self, step: Step, began: float) -> None:
        with self.shared.turn() as now:
            self.shared.machine.computed(step.num_rows, now - began)
            for chunk in step.chunks:
                order = self._orders[chunk.request.id]
                self.shared.machine.advanced(order, chunk.request.num_computed, now)
        ended = [chunk.request for chunk in step.chunks if chunk.request.finish_reason is not None]
        for request in ended:
            order = self._orders.pop(request.id)
            if self.scheduler.cache.keeps and request.finish_reason is not FinishReason.ERROR:
                self._held.hold_path(order, request.slots[: len(order.tokens)])
        self.observe(PrefillRecord(began, now, len(step.chunks), step.num_rows, len(ended)))

    def _fail(self, step: Step, error: Exception) -> None:
        logger.error("a forward failed: %s: %s", type(error).__name__, error, exc_info=error)
        with self.shared.turn() as now:
            for chunk in step.chunks:
                order = self._orders[chunk.request.id]
                self.shared.machine.fail(order, f"a forward failed: {type(error).__name__}: {error}", now)
        for chunk in step.chunks:
            self._drop(chunk.request)
        self.exporter.wake()

    def check(self) -> None:
        """EngineError unless every slot is free, or in the cache, or known to be in use."""
        owned = [slot for request in self.scheduler.running for slot in request.held.tolist()]
        self.scheduler.pool.check([*owned, *self._held.slots], self.scheduler.cache.slots)


class HeldSlots:
    """Slots held for the exporter, by order: they stay as they are, though the request has ended."""

    def __init__(self, pool: SlotPool) -> None:
        self._pool = pool
        self._held: dict[TakenOrder, list[Slots]] = {}
        self._out: Counter[TakenOrder] = Counter()  # exports that are under way

    @property
    def slots(self) -> list[int]:
        return [slot for held in self._held.values() for slots in held for slot in slots.tolist()]

    def export(self, order: TakenOrder, slots: Slots) -> None:
        self._hold(order, slots)
        self._out[order] += 1

    def exported(self, order: TakenOrder) -> None:
        if order in self._held:
            self._out[order] -= 1

    def hold_path(self, order: TakenOrder, slots: Slots) -> None:
        """All slots of an ended request: any above held slots must be held too, or they would count as available."""
        if self._out[order]:
            self._hold(order, slots)

    def let_go(self, order: TakenOrder) -> None:
        for slots in self._held.pop(order, ()):
            self._pool.release(slots)
        del self._out[order]

    def done(self) -> list[TakenOrder]:
        return [order for order in self._held if not self._out[order] or not order.live]

    def _hold(self, order: TakenOrder, slots: Slots) -> None:
        self._pool.share(slots)
        self._held.setdefault(order, []).append(slots)
