import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import msgspec
from llguidance import LLMatcher

from pilotfish.config.engine import EngineConfig
from pilotfish.core.routing.router import ReplicaLoad
from pilotfish.core.sampling.constraint import Constraint
from pilotfish.core.scheduling.request import FinishReason
from pilotfish.engine.drafts.remote_drafts import RemoteDrafts
from pilotfish.engine.engine import Engine
from pilotfish.engine.fingerprint import fingerprint, output_facts, read_weights
from pilotfish.engine.prefills.remote_prefills import RemotePrefills
from pilotfish.engine.processes.process import Signals
from pilotfish.engine.sample import Sample
from pilotfish.engine.targets.servers import AttendedServer, Dropped, FromServer, HeldFollowers, Malformed, Servers
from pilotfish.engine.targets.status import arrivals_at, identity_of, status_of, step_report
from pilotfish.errors import EngineError, InputError, RankLost
from pilotfish.wire.serving import Abort, Delta, Revise, StepReport, Submit

logger = logging.getLogger(__name__)

#: Seconds between two Status messages, and at least between two of which the second tells of a change.
STATUS, CHANGE = 1.0, 0.1
CHECK = 60.0  # seconds between two checks of the KV slots, which are made while idle
#: Broken steps in succession after which the process gives up: a new one may do better.
MAX_FAILURES = 3
LONGEST_TEXT = 1000  # characters of a message to the server


def run_target(
    config: EngineConfig,
    servers: Servers,
    signals: Signals,
    remote: RemoteDrafts | None = None,
    prefills: RemotePrefills | None = None,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serves until one of `signals` comes; calls `ready` once it can. `remote` and `prefills` run already. InputError
    for a model that cannot be served."""
    weights = read_weights(config.target)
    with Engine(config, remote=remote, prefills=prefills) as engine:
        assert engine.grammars is not None  # since it was loaded
        engine.grammars.warm()
        service = TargetService(engine, servers)
        facts = output_facts(engine.config, engine.executor, engine.tokenizer)
        weights.add_done_callback(lambda digests: service.identify(facts, digests))
        ready()
        signals.call(service.stop)
        service.run()


@dataclass(frozen=True)
class RequestKey:
    server: AttendedServer
    id: int


@dataclass(frozen=True)
class Compiling:
    message: Submit
    grammar: Future[LLMatcher]


class TargetService:
    def __init__(self, engine: Engine, servers: Servers) -> None:
        self._engine = engine
        self._identity = identity_of(engine)
        self._servers = servers
        self._clock = time.perf_counter  # as the engine's step records
        self._samples: dict[RequestKey, list[Sample]] = {}
        self._compiling: dict[RequestKey, Compiling] = {}  # requests whose grammar is not there yet
        self._stopping = False
        self._failures = 0
        self._fault: Exception | None = None
        self._told = -STATUS  # when the last Status was sent
        self._load: ReplicaLoad | None = None  # of the last Status
        self._checked = -CHECK
        self._began: float | None = None  # start of the present step; None between steps
        self._stepped: float | None = None  # end of the last step, if no wait followed it
        self._held = HeldFollowers(engine.worker.scheduler.cache, servers, self._clock)
        servers.step_seconds = self.step_seconds
        engine.worker.take_in = self._take_all

    def run(self) -> None:
        self._tell_status(True)
        while not self._stopping:
            self._engine.refuse_lost_rank()
            if not self._engine.busy:
                self._take_all(self._told + STATUS - self._clock())
            stepped = self._engine.busy
            if stepped:
                self._began = self._clock()
                self._step()
                self._began = None
            else:
                self._stepped = None
            idle = stepped and not self._engine.busy
            self._tell_status(idle)
            self._held.tell(idle)
            if idle and self._clock() - self._checked >= CHECK:
                self._check_slots()
        self._servers.leave()
        self._check_slots()

    def stop(self) -> None:
        """From any thread, or a signal's handler."""
        self._stopping = True
        self._servers.wake()

    def identify(self, facts: dict[str, str], weights: Future[list[str]]) -> None:
        """From any thread. Servers know the fingerprint from the next Status on."""
        if (error := weights.exception()) is not None:
            logger.warning("weights: nobody can go on with this target's outputs, as they cannot be read: %s", error)
        else:
            found = fingerprint(facts, weights.result())
            self._identity = msgspec.structs.replace(self._identity, fingerprint=found)

    def step_seconds(self) -> float:
        """0 between steps. Any thread may call this."""
        began = self._began
        return 0.0 if began is None else max(0.0, self._clock() - began)

    def _check_slots(self) -> None:
        self._checked = self._clock()
        try:
            self._engine.check()
        except EngineError as error:
            logger.error("KV slots leak: %s", error)

    # -- what comes in

    def _take_all(self, wait: float = 0.0) -> None:
        try:
            for asked in self._servers.take(wait):
                self._take(asked)
            self._take_compiled()
        except Exception as error:  # a fault of ours: the process ends, and others go on with its requests
            self._fault = error
            raise

    def _take(self, asked: FromServer) -> None:
        message = asked.message
        if isinstance(message, Dropped):
            self._drop(asked.server, message)
            return
        key = RequestKey(asked.server, message.id)
        if isinstance(message, Malformed):
            self._fail(key, InputError(message.reason))
        elif isinstance(message, Abort):
            self._abort(key)
        elif isinstance(message, Revise):
            self._revise(key, message)
        elif key in self._samples or key in self._compiling:
            logger.warning("dropped a request of server %s: its number %d is in use", asked.server.peer.hex(), key.id)
        elif (constraint := message.request.params.structured_outputs) is None:
            self._submit(key, message)
        else:
            self._compile(key, message, constraint)

    def _drop(self, server: AttendedServer, dropped: Dropped) -> None:
        ended = [key for key in (*self._samples, *self._compiling) if key.server is server]
        if ended:
            logger.warning("requests of server %s end, %d of them: %s", server.peer.hex(), len(ended), dropped.reason)
        for key in ended:
            self._abort(key)
        self._servers.drop(server, dropped)

    def _compile(self, key: RequestKey, message: Submit, constraint: Constraint) -> None:
        assert self._engine.grammars is not None  # since it was loaded
        compiled = self._engine.grammars.compile(constraint)
        self._compiling[key] = Compiling(message, compiled)
        compiled.add_done_callback(lambda _: self._servers.wake())

    def _take_compiled(self) -> None:
        for key, compiling in list(self._compiling.items()):
            if not compiling.grammar.done():
                continue
            del self._compiling[key]
            if (error := compiling.grammar.exception()) is None:
                self._submit(key, compiling.message, compiling.grammar.result())
            else:
                self._fail(key, error if isinstance(error, InputError) else EngineError(str(error)))

    def _submit(self, key: RequestKey, message: Submit, compiled: LLMatcher | None = None) -> None:
        try:
            samples = self._engine.add(message.request, compiled, message.resumed)
        except InputError as error:
            self._fail(key, error)
            return
        for sample in samples:
            sample.request_id = message.id
            sample.owner = key
        self._samples[key] = samples

    def _revise(self, key: RequestKey, message: Revise) -> None:
        for sample in self._samples.get(key, []):
            self._engine.revise(sample, message.max_nodes)
        if (compiling := self._compiling.get(key)) is not None:
            revised = msgspec.structs.replace(compiling.message.request, max_nodes=message.max_nodes)
            asked = msgspec.structs.replace(compiling.message, request=revised)
            self._compiling[key] = replace(compiling, message=asked)

    def _abort(self, key: RequestKey) -> None:
        compiling = self._compiling.pop(key, None)
        if compiling is not None:
            compiling.grammar.cancel()  # or those of requests that have gone would keep others waiting
        for sample in self._samples.pop(key, []):
            self._engine.abort(sample)

    # -- a step

    def _step(self) -> None:
        try:
            deltas = self._engine.advance()
        except RankLost:
            raise  # its requests fare as those of a target that was killed
        except EngineError as error:
            if self._fault is not None:
                raise self._fault from None
            self._break(error)
            return
        self._failures = 0
        if (record := self._engine.worker.last_step) is None:
            return
        self._tell_progress(step_report(record, self._stepped, arrivals_at(self._engine)), deltas)
        self._stepped = record.ended
        self._end([sample for sample, delta in deltas.items() if delta.finish is not None])

    def _tell_progress(self, report: StepReport, deltas: Mapping[Sample, Delta]) -> None:
        told: dict[AttendedServer, list[Delta]] = {key.server: [] for key in self._samples}
        for sample, delta in deltas.items():
            if delta.finish is None or delta.finish.reason is not FinishReason.ERROR:
                told[sample.owner.server].append(self._with_pool(sample, delta))
        for server, added in told.items():
            self._servers.progress(server, report, added)

    def _with_pool(self, sample: Sample, delta: Delta) -> Delta:
        if delta.queued is None or self._engine.remote is None:
            return delta
        pool = self._engine.remote.drafter.pool_of(sample.request)
        return delta if pool is None else msgspec.structs.replace(delta, pool=pool.name)

    def _end(self, samples: Sequence[Sample]) -> None:
        errors = {sample.owner: sample.error for sample in samples if sample.error is not None}
        for key, error in errors.items():
            logger.error("%s", error)
            self._fail(key, error)
        for key in {sample.owner for sample in samples} - errors.keys():
            if all(sample.finish_reason is not None for sample in self._samples[key]):
                del self._samples[key]

    def _fail(self, key: RequestKey, error: InputError | EngineError) -> None:
        self._abort(key)
        reason, refused = str(error)[:LONGEST_TEXT], isinstance(error, InputError)
        self._servers.fail(key.server, [key.id], reason, refused, getattr(error, "field", None))

    def _break(self, error: EngineError) -> None:
        """Requests with an output that ended in the step end as a whole."""
        logger.error("%s", error, exc_info=True)
        broken = [key for key, samples in self._samples.items() if any(s.finish_reason == "abort" for s in samples)]
        for key in broken:
            self._fail(key, error)
        self._stepped = None
        self._failures += 1
        if self._failures >= MAX_FAILURES:
            raise error

    # -- what goes out

    def _tell_status(self, idle: bool) -> None:
        """If one is due, or if the last request has just ended (`idle`)."""
        now = self._clock()
        if not idle and now - self._told < CHANGE:
            return
        status = status_of(self._engine, self._identity, self._servers.incarnation)
        if idle or now - self._told >= STATUS or status.load != self._load:
            self._told, self._load = now, status.load
            self._servers.tell_all(status)
