"""Imports no torch."""

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np

from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import least_sent, model_name
from pilotfish.core.cache.slots import Slots
from pilotfish.core.peers.fields import Peer
from pilotfish.core.prefilling.handover import HandOver
from pilotfish.core.prefilling.handover_machine import HandOverMachine, PoolMemory, ReadSegment
from pilotfish.core.prefilling.incoming import Incoming
from pilotfish.core.prefilling.prefill_messages import PREFILL_VERSION, PrefillHello, Welcome
from pilotfish.core.prefilling.prefill_pools import PrefillOption, PrefillPool
from pilotfish.core.prefilling.segments import KVIdentity
from pilotfish.engine.pools.remote_pools import RemotePools, salt_key
from pilotfish.engine.processes.placement import split_for_prefill
from pilotfish.engine.processes.process import keep_freed_memory
from pilotfish.engine.targets.members import Member
from pilotfish.errors import SegmentError, WireError
from pilotfish.kv.arena import Bytes, SharedMemoryReader, check_content
from pilotfish.kv.lanes import URGENT, Lane
from pilotfish.kv.nixl import NixlReader, nixl_installed
from pilotfish.wire.channel import Frame, decode_from_prefill
from pilotfish.wire.pool_users import PoolUser

logger = logging.getLogger(__name__)

WAIT = 0.002  # seconds that `wait` waits
CLOSING = 1.0  # seconds that a pool's thread has to end
TICK = 0.05  # seconds between two looks at greetings and leases

#: Writes layers of tokens into their slots [tokens], out of a segment's bytes.
WriteLayers: TypeAlias = Callable[[Slots, range, Bytes], None]


@dataclass
class Source:
    lane: Lane
    reader: SharedMemoryReader | NixlReader | None = None  # None: segments are fetched, or the pool is lost

    def close(self) -> None:
        reader, self.reader = self.reader, None
        if reader is not None:
            reader.close()


class HandOvers(PoolUser[PrefillPool]):
    """A socket, a clock, locks and threads around the target's machine (core/prefilling/handover_machine.py).

    scheduler's thread   worth_sending, begin ── PrefillOrder ─►         ◄── poll: what has come, or takes too long
    channel's thread     SegmentReady, SegmentBytes, PrefillLoad … ─► machine ─► work
    a thread a pool      work: read a segment, check it, write it into slots ── Taken ─►

    Slots are written only under the lock of their hand-over, and never after it ended."""

    machine: HandOverMachine

    def __init__(
        self,
        machine: HandOverMachine,
        write: WriteLayers,
        post: Callable[..., None],
        problem: Callable[[Peer], str | None] = lambda _: None,
        transports: Sequence[str] = EngineConfig.prefill_transports,
    ) -> None:
        """`transports`: ways to read a pool's memory, the best first; without any, segments are fetched."""
        super().__init__(machine, post, problem, time.perf_counter)
        self._write, self._transports = write, transports
        self._locks: dict[Incoming, threading.Lock] = {}  # of the hand-overs under way: around their slots
        self._event = threading.Event()  # a hand-over may have ended
        self._option: PrefillOption | None = None  # what `worth_sending` found
        self._sources = {pool.peer: self._source(pool) for pool in machine.pools}

    def _source(self, pool: PrefillPool) -> Source:
        return Source(Lane(f"KV from {pool.name}", self._clock))

    def _end_turn(self) -> None:
        for work in self.machine.work:
            pool = work.incoming.pool if isinstance(work, ReadSegment) else work.pool
            self._sources[pool.peer].lane.put(URGENT, partial(self._do, self._sources[pool.peer], work))
        self.machine.work.clear()
        if self.machine.settled:
            self._event.set()

    # -- the scheduler's thread

    def computed(self, tokens: int, seconds: float) -> None:
        self.machine.choice.here.observe(tokens, seconds)

    def worth_sending(self, tokens: Sequence[int], first: int, salt: str | None, waiting: int, neighbours: int) -> bool:
        with self._turn() as now:
            self._option = self.machine.option(tokens, first, salt, waiting, neighbours, now)
        return self._option is not None

    def begin(self, handover: HandOver) -> None:
        assert self._option is not None  # `worth_sending` has just said so
        with self._turn() as now:
            incoming = self.machine.begin(handover, self._option, now)
            if incoming is not None:
                self._locks[incoming] = threading.Lock()

    def poll(self) -> None:
        if not self._locks:
            return
        self._event.clear()
        with self._turn() as now:
            ended = self.machine.settle(now)
        for incoming in ended:
            self._leave(incoming)

    def cancel(self, handover: HandOver) -> None:
        if handover.count is not None:  # its pool was lost as it began
            return
        with self._turn() as now:
            incoming = self.machine.cancel(handover, now)
        self._leave(incoming)

    def _leave(self, incoming: Incoming) -> None:
        """After it returns, nobody writes to the slots."""
        with self._locks.pop(incoming):
            """Whoever was writing is done; the next one sees that it has ended."""

    def wait(self) -> None:
        self._event.wait(WAIT)

    # -- the channel's thread

    def join(self, pool: PrefillPool) -> None:
        self._sources[pool.peer] = self._source(pool)
        super().join(pool)

    def leave(self, pool: PrefillPool) -> None:
        super().leave(pool)
        self._sources.pop(pool.peer).lane.close(0.0)

    def _decoded(self, pool: PrefillPool, frame: Frame) -> Callable[[float], None]:
        try:
            return partial(self.machine.receive, pool, decode_from_prefill(frame))
        except WireError as error:
            return partial(self.machine.malformed, pool, str(error))

    # -- a pool's thread

    def _do(self, source: Source, work: PoolMemory | ReadSegment) -> None:
        if isinstance(work, ReadSegment):
            self._read(source, work)
        elif work.welcome is None:
            source.close()
        else:
            self._open(source, work, work.welcome)

    def _open(self, source: Source, work: PoolMemory, welcome: Welcome) -> None:
        source.reader = reader = open_memory(welcome, self._transports)
        with self._turn() as now:
            transport = work.pool.scheme if reader is None else reader.transport
            self.machine.opened(work, transport, now, fetches=reader is None)

    def _read(self, source: Source, work: ReadSegment) -> None:
        incoming, began, lock = work.incoming, self._clock(), self._locks.get(work.incoming)
        if lock is None or incoming.outcome:
            return
        try:
            data = self._data(source, work)
        except SegmentError as error:
            with self._turn() as now:
                self.machine.refuse(incoming, error.reason, now, str(error))
            return
        reference, handover = work.reference, incoming.handover
        first = reference.first - handover.first
        with lock:
            if not incoming.ended:
                layers = range(reference.layer, reference.layer + reference.layers)
                self._write(handover.slots[first : first + reference.tokens], layers, data)
        with self._turn() as now:
            self.machine.landed(work, now - began, now)

    def _data(self, source: Source, work: ReadSegment) -> Bytes:
        if work.data is not None:
            check_content(work.reference, work.data)
            return np.frombuffer(work.data, np.uint8)
        assert source.reader is not None  # or segments were fetched, or the hand-over had ended
        return source.reader.read(work.reference)

    def close(self) -> None:
        """Call it after the channel's thread has ended, with no hand-over under way."""
        for source in self._sources.values():
            source.lane.close(CLOSING)
            source.close()


def open_memory(welcome: Welcome, transports: Sequence[str]) -> SharedMemoryReader | NixlReader | None:
    """The first transport that works; None for none. May take seconds."""
    for transport in transports:
        try:
            if transport == "shm" and welcome.shared_memory is not None:
                return SharedMemoryReader(welcome.shared_memory)
            if transport == "nixl" and welcome.remote_memory is not None and nixl_installed():
                return NixlReader(welcome.remote_memory)
        except (OSError, ValueError) as error:
            logger.info("segments of %s are not read by %s: %s", welcome.model, transport, error)
    return None


class RemotePrefills(RemotePools[PrefillPool]):
    role, without, must_answer = "prefill", "prompts are computed without it until it comes", False
    handovers: HandOvers  # once `connect` has made them

    def __init__(self, config: EngineConfig, taken: frozenset[int] = frozenset()) -> None:
        """`taken` are cores of draft workers. ParameterError for cores that cannot be used."""
        super().__init__(config, config.prefill_pool)
        self.cores = frozenset[int]()  # the target's own business, unless workers are started
        if config.prefill_workers:
            free = frozenset(os.sched_getaffinity(0)) - taken
            cores, workers = config.prefill_cores, config.prefill_workers
            self._start_workers(split_for_prefill(free, config.cores, cores, workers, taken))

    def connect(self, identity: Callable[[], KVIdentity], write: WriteLayers) -> HandOvers:
        """Returns once every pool serves, as `wait` says."""
        config = self._config
        self._make_channel(config.prefill_key, config.prefill_pool_key, TICK)
        machine = HandOverMachine(None, (), least_sent(config.prefill_threshold), salt_key(self._own))
        handovers = self.handovers = HandOvers(
            machine, write, self._thread.post, self._channel.problem, config.prefill_transports
        )
        self._identity = identity
        self._open.callback(handovers.close)
        keep_freed_memory()
        self._start_channel(
            handovers, lambda member, peer: PrefillPool(member.label, peer, scheme=member.endpoint.partition(":")[0])
        )
        if self.endpoints:
            self._introduce()
        self._dial()
        self.wait(optional=False)
        return handovers

    def set_pools(self, members: Sequence[Member]) -> None:
        if members:
            self._introduce()
        super().set_pools(members)

    def _introduce(self) -> None:
        """The identity takes seconds to find if weights are large."""
        if self.handovers.machine.greeting is None:
            greeting = PrefillHello(PREFILL_VERSION, self._identity(), model_name(self._config.target))
            self.handovers.machine.greeting = greeting

    def _in_vain(self, pool: PrefillPool) -> str | None:
        if pool.refusal is not None:
            return f"prefill_pool: {pool.name}: {pool.refusal}"
        if self._channel.refused(pool.peer):
            return self._channel.problem(pool.peer)
        return self._worker_down()
