"""A target worker's process: an engine, a socket to the server, one loop."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass

from llguidance import LLMatcher

from pilotfish.config import EngineConfig, model_name
from pilotfish.core.constraint import Constraint
from pilotfish.core.messages import Load
from pilotfish.core.pools import DraftPool
from pilotfish.core.prefill_messages import PrefillLoad
from pilotfish.core.prefill_pools import PrefillPool
from pilotfish.core.request import FinishReason
from pilotfish.core.target_machine import Arrival
from pilotfish.core.tiers import DEVICE, TierCounts, TierUse
from pilotfish.engine.engine import Engine
from pilotfish.engine.process import Signals
from pilotfish.engine.remote_drafts import RemoteDrafts
from pilotfish.engine.remote_prefills import RemotePrefills
from pilotfish.engine.sample import Sample
from pilotfish.errors import EngineError, InputError, WireError
from pilotfish.observe.records import StepRecord
from pilotfish.wire.channel import Channel, ChannelThread, Received, decoded, encode
from pilotfish.wire.serving import (
    SERVER,
    TARGET_DECODER,
    Abort,
    Attend,
    Beat,
    Failure,
    Identity,
    PoolLoad,
    PrefillPoolLoad,
    Progress,
    Status,
    StepReport,
    Submit,
    ToServer,
)
from pilotfish.wire.sockets import DialingChannel

logger = logging.getLogger(__name__)

#: Seconds between two Status messages; until the first one has left, between two attempts.
STATUS, FIRST_STATUS = 1.0, 0.02
#: Seconds between two beats.
BEAT = 0.5
#: Seconds between two checks of the KV slots, which are made while idle.
CHECK = 60.0
#: Broken steps in succession after which the process gives up: a new one may do better.
MAX_FAILURES = 3
#: Characters of a message to the server.
LONGEST_TEXT = 1000
#: Of a pool that has not answered yet.
NO_LOAD, NO_PREFILL_LOAD = Load("", 0, 0, 0, 0, 0.0, 0.0), PrefillLoad(0, 0, 0.0, 0)


def run_target(
    config: EngineConfig,
    endpoint: str,
    signals: Signals,
    remote: RemoteDrafts | None = None,
    prefills: RemotePrefills | None = None,
) -> None:
    """Serve the server that listens at `endpoint` until one of `signals` comes. `remote` are the configuration's drafts
    elsewhere, `prefills` its prefill workers, if they were started already. InputError for a model that cannot be
    served."""
    channel = DialingChannel((endpoint,), secrets.token_bytes(8), high_water=0)
    services: list[TargetService] = []  # one, once the engine is there
    heartbeat = start_heartbeat(endpoint, lambda: services[0].step_seconds() if services else 0.0)
    with closing(channel), closing(heartbeat), Engine(config, remote=remote, prefills=prefills) as engine:
        assert engine.grammars is not None  # since it was loaded
        engine.grammars.warm()
        service = TargetService(engine, channel)
        services.append(service)
        signals.call(service.stop)
        service.run()


def start_heartbeat(endpoint: str, step_seconds: Callable[[], float]) -> ChannelThread:
    """Send a Beat every BEAT seconds until it is closed, over a connection of its own. A forward lets other threads
    run, so silence means that the process stands still. A long step shows in the Beat itself."""
    heartbeat = ChannelThread(DialingChannel((endpoint,), secrets.token_bytes(8)), BEAT)
    heartbeat.start(lambda _: None, lambda: heartbeat.post(SERVER, encode(Beat(os.getpid(), step_seconds()))))
    return heartbeat


@dataclass(frozen=True)
class Compiling:
    message: Submit
    grammar: Future[LLMatcher]


class TargetService:
    """Runs a server's requests on an engine: takes them in, steps, sends what each step added."""

    def __init__(self, engine: Engine, channel: Channel, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` must be that of the engine's step records."""
        self._engine = engine
        self._channel = channel
        self._clock = clock
        self._samples: dict[int, list[Sample]] = {}  # by the request's id
        self._compiling: dict[int, Compiling] = {}  # requests whose grammar is not there yet, by id
        self._stopping = False
        self._sequence = 0
        self._failures = 0
        self._told = -STATUS  # when the last Status was sent; less than 0 before the first one
        self._checked = -CHECK
        self._began: float | None = None  # start of the present step; None between steps
        self._stepped: float | None = None  # end of the last step, if no wait followed it

    def run(self) -> None:
        """Until `stop`."""
        while not self._stopping:
            for received in self._channel.receive(0.0 if self._engine.busy else self._pause()):
                self._take(received)
            self._take_compiled()
            stepped = self._engine.busy
            if stepped:
                self._began = self._clock()
                self._step()
                self._began = None
            else:
                self._stepped = None
            idle = stepped and not self._engine.busy
            self._tell_status(idle)
            if idle and self._clock() - self._checked >= CHECK:
                self._check_slots()
        self._check_slots()

    def stop(self) -> None:
        """From any thread, or a signal's handler."""
        self._stopping = True
        self._channel.wake()

    def step_seconds(self) -> float:
        """Seconds that the present step has lasted; 0 between steps. Any thread may call this."""
        began = self._began
        return 0.0 if began is None else max(0.0, self._clock() - began)

    def _pause(self) -> float:
        return FIRST_STATUS if self._told < 0 else max(0.0, self._told + STATUS - self._clock())

    def _check_slots(self) -> None:
        self._checked = self._clock()
        try:
            self._engine.check()
        except EngineError as error:
            logger.error("KV slots leak: %s", error)

    # -- what comes in

    def _take(self, received: Received) -> None:
        try:
            message = decoded(TARGET_DECODER, received.frame)
        except WireError as error:
            logger.error("a request was dropped: %s", error)
            return
        if isinstance(message, Attend):
            return
        if isinstance(message, Abort):
            self._abort(message)
        elif (constraint := message.params.structured_outputs) is None:
            self._submit(message)
        else:
            self._compile(message, constraint)

    def _compile(self, message: Submit, constraint: Constraint) -> None:
        """Requests without a grammar do not wait for those with one."""
        assert self._engine.grammars is not None  # since it was loaded
        compiled = self._engine.grammars.compile(constraint)
        self._compiling[message.id] = Compiling(message, compiled)
        compiled.add_done_callback(lambda _: self._channel.wake())

    def _take_compiled(self) -> None:
        """Submit the requests whose grammars are there, or cannot be."""
        for request, compiling in list(self._compiling.items()):
            if not compiling.grammar.done():
                continue
            del self._compiling[request]
            if (error := compiling.grammar.exception()) is None:
                self._submit(compiling.message, compiling.grammar.result())
            else:
                self._fail([request], error if isinstance(error, InputError) else EngineError(str(error)))

    def _submit(self, message: Submit, compiled: LLMatcher | None = None) -> None:
        limits = (message.cache_salt, message.max_nodes)
        try:
            samples = self._engine.submit(message.tokens, message.params, *limits, compiled)
        except InputError as error:
            self._fail([message.id], error)
            return
        for sample in samples:
            sample.request_id = message.id
        self._samples[message.id] = samples

    def _abort(self, message: Abort) -> None:
        compiling = self._compiling.pop(message.id, None)
        if compiling is not None:
            compiling.grammar.cancel()  # or those of requests that have gone would keep others waiting
        for sample in self._samples.pop(message.id, []):
            self._engine.abort(sample)

    # -- a step

    def _step(self) -> None:
        try:
            deltas = self._engine.step()
        except EngineError as error:
            self._break(error)
            return
        self._failures = 0
        if (record := self._engine.worker.last_step) is None:
            return
        whole = [delta for delta in deltas if delta.finish is None or delta.finish.reason is not FinishReason.ERROR]
        self._tell(Progress(self._sequence, step_report(record, self._stepped, _arrivals(self._engine)), whole))
        self._sequence += 1
        self._stepped = record.ended
        self._end([self._samples[delta.id][delta.index] for delta in deltas if delta.finish is not None])

    def _end(self, samples: Sequence[Sample]) -> None:
        """Forget requests whose outputs have all ended. Requests with an output that ended with an error end as a
        whole."""
        errors = {sample.request_id: sample.error for sample in samples if sample.error is not None}
        for request, error in errors.items():
            logger.error("%s", error)
            self._fail([request], error)
        for request in {sample.request_id for sample in samples} - errors.keys():
            if all(sample.finish_reason is not None for sample in self._samples[request]):
                del self._samples[request]

    def _fail(self, requests: Sequence[int], error: InputError | EngineError) -> None:
        """End requests as a whole."""
        for request in requests:
            self._abort(Abort(request))
        reason, refused = str(error)[:LONGEST_TEXT], isinstance(error, InputError)
        self._tell(Failure(list(requests), reason, refused, getattr(error, "field", None)))

    def _break(self, error: EngineError) -> None:
        """The step broke. Requests with an output that ended in it end as a whole."""
        logger.error("%s", error, exc_info=True)
        broken = [i for i, samples in self._samples.items() if any(s.finish_reason == "abort" for s in samples)]
        self._fail(broken, error)
        self._stepped = None
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            raise error

    # -- what goes out

    def _tell_status(self, idle: bool) -> None:
        """Send a Status if one is due, or if the last request has just ended (`idle`)."""
        now = self._clock()
        if idle or self._told < 0 or now - self._told >= STATUS:
            self._told = now if self._tell(self._status()) else self._told

    def _status(self) -> Status:
        scheduler = self._engine.worker.scheduler
        return Status(
            identity=identity_of(self._engine),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free_slots=scheduler.pool.num_available,
            preemptions=scheduler.preemptions,
            pools=_pools(self._engine),
            prefill_pools=_prefill_pools(self._engine),
            tiers=tiers_of(self._engine),
            tier_counts=TierCounts() if self._engine.tiers is None else self._engine.tiers.counts,
        )

    def _tell(self, message: ToServer) -> bool:
        return self._channel.send(SERVER, encode(message))


def step_report(record: StepRecord, before: float | None, pushes: Sequence[Arrival] = ()) -> StepReport:
    """`before` is the end of the last step: the loop's time since then counts as this step's coordination."""
    draft = record.drafted - record.planned
    forward, verify = record.computed - record.prepared, record.verified - record.computed
    began = record.began if before is None else before
    return StepReport(
        at=record.began,
        draft=draft,
        forward=forward,
        verify=verify,
        coordination=max(0.0, record.ended - began - draft - forward - verify),
        sequences=record.sequences,
        rows=record.rows,
        nodes=record.nodes,
        accepted=record.accepted,
        committed=record.committed,
        hits=record.hits,
        verified=record.verified,
        pushes=list(pushes),
    )


def identity_of(engine: Engine) -> Identity:
    config = engine.config
    return Identity(
        model=model_name(config.target),
        mode=config.mode,
        dtype=engine.precision.name,
        context=engine.model.config.context,
        vocab_size=engine.model.config.vocab_size,
        kv_slots=engine.memory.slots,
        longest=engine.worker.scheduler.longest(engine.model.config.context),
        max_requests=engine.worker.scheduler.max_requests,
        max_nodes=0 if config.mode == "off" else config.nodes,
        quantization=config.quantization,
        kv_dtype=config.kv_dtype,
    )


def tiers_of(engine: Engine) -> list[TierUse]:
    """The device, and the tiers below it."""
    scheduler, size = engine.worker.scheduler, engine.memory.target.slot
    pool, evicted = scheduler.pool, 0 if scheduler.cache is None else scheduler.cache.evicted
    device = TierUse(DEVICE, (pool.capacity - pool.num_free) * size, pool.capacity * size, evicted=evicted)
    return [device, *([] if engine.tiers is None else engine.tiers.use())]


def _arrivals(engine: Engine) -> list[Arrival]:
    """All arrivals since the last call; the channel's thread may append meanwhile."""
    if engine.remote is None:
        return []
    arrivals = engine.remote.drafter.machine.arrivals
    return [arrivals.popleft() for _ in range(len(arrivals))]


def _pools(engine: Engine) -> list[PoolLoad]:
    if engine.remote is None:
        return []
    return [_pool_load(pool, pool.load or NO_LOAD) for pool in engine.remote.pools]


def _pool_load(pool: DraftPool, load: Load) -> PoolLoad:
    times, counts = (load.step_ms, load.queue_ms), (pool.drops.counts, load.own_cached)
    return PoolLoad(pool.name, pool.ready, load.sessions, load.free_slots, *times, *counts)


def _prefill_pools(engine: Engine) -> list[PrefillPoolLoad]:
    if engine.prefills is None:
        return []
    return [_prefill_pool_load(pool, pool.load or NO_PREFILL_LOAD) for pool in engine.prefills.pools]


def _prefill_pool_load(pool: PrefillPool, load: PrefillLoad) -> PrefillPoolLoad:
    return PrefillPoolLoad(
        name=pool.name,
        ready=pool.ready,
        transport=pool.transport if pool.ready else "",
        queued_tokens=load.queued_tokens,
        free_slots=load.free_slots,
        token_ms=load.token_ms,
        leases=load.leases,
        totals=pool.totals,
        refused=pool.refused,
    )
