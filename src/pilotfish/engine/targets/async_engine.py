import asyncio
import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec

from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import model_name
from pilotfish.config.server import ServerConfig
from pilotfish.core.drafting.vocabulary import text_digest
from pilotfish.core.routing.held_prefixes import routing_keys
from pilotfish.core.routing.router import RouteRequest
from pilotfish.core.sampling.noise import DRAWN_SEED_BITS
from pilotfish.engine.targets.fleet import Fleet
from pilotfish.engine.targets.replica import TARGET, Replica, ReplicaHealth, RoutedTokens
from pilotfish.engine.targets.stream import OpenRequest, Stream
from pilotfish.errors import EngineError, ParameterError, PromptError, TargetUnavailable
from pilotfish.wire.serving import Delta, EngineRequest, Failure, Identity, StepReport

logger = logging.getLogger(__name__)

#: Targets that may be lost while they have a request, before it fails: it may be what ends them.
MAX_LOSSES = 3
CLOSED = "draining: the server is shutting down"


@dataclasses.dataclass(frozen=True)
class Health:
    ready: bool
    reason: str  # why not ready, in one line; "" if ready
    retry_after: float  # seconds until requests may be served, estimated from the duration of the last start
    restarts: int  # of all processes that the server has started
    failed: bool  # whether all targets stay down
    identity: Identity | None  # what the targets that serve are together; None while there are none
    replicas: tuple[ReplicaHealth, ...] = ()


class AsyncEngine:
    """`start`, `submit` from the same event loop, `close`. A request whose target is lost goes on at another one, with
    the same tokens. A silent target, such as a stopped process, keeps its requests for `target_timeout` seconds."""

    def __init__(
        self,
        config: EngineConfig,
        server: ServerConfig | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
        own_name: str = TARGET,
    ) -> None:
        """`environment` is added to that of the started processes, called `own_name`."""
        self.config = config
        self.name = model_name(config.target)
        self.tokenizer: Any = None  # until `start`
        self.defaults: dict[str, Any] = {}  # the model's own sampling parameters, by SamplingParams' names
        self.observe: Callable[[StepReport, Sequence[Delta]], None] = lambda *_: None
        self.resumes = 0  # requests that went on at another target
        self.routed = RoutedTokens()
        self._server = server or ServerConfig()
        self._fleet = Fleet(config, self._server, self, environment, own_name)
        self._waiting: list[OpenRequest] = []  # for a target that may go on with them
        self._identity: Identity | None = None  # the last one
        self._own: dict[str, str] = {}  # digests of the model's files, as in Identity, once they are read

    # -- the targets

    async def start(self) -> None:
        """ModelError for an unusable tokenizer or generation_config.json; `health` tells of other problems, and of
        readiness."""
        await self._fleet.start()
        await asyncio.to_thread(self._read_model)

    def _read_model(self) -> None:
        from pilotfish.model.loading import metadata  # takes seconds

        metadata.log_through_root()
        self.tokenizer = metadata.load_tokenizer(self.config.target)
        self.defaults = metadata.read_generation_config(self.config.target).defaults
        self._own = {"tokenizer": text_digest(self.tokenizer), "config": metadata.config_digest(self.config.target)}

    async def close(self) -> None:
        """Open streams fail. Idempotent."""
        for request in self._waiting:
            if not request.ended:
                self._fail(request, TargetUnavailable(CLOSED, self.health.retry_after))
        await self._fleet.close(CLOSED)

    @property
    def health(self) -> Health:
        replicas = tuple(replica.health for replica in self._fleet.replicas)
        reason, failed = "" if self._fleet.taking else self._absence(), self._fleet.failed
        retry = min((replica.retry_after for replica in replicas), default=self._server.resume_timeout)
        restarts = sum(replica.restarts for replica in replicas)
        return Health(not reason, reason, retry, restarts, failed, self._present_identity(), replicas)

    def _absence(self) -> str:
        if self._fleet.closed and not self._fleet.failed:
            return CLOSED
        reasons = [replica.health.reason for replica in self._fleet.replicas]
        return "; ".join(reasons) or "target: there is none"

    def _present_identity(self) -> Identity | None:
        if not self._fleet.closed:
            known = [replica.status.identity for replica in self._fleet.replicas if replica.status is not None]
            self._identity = together(known) if known else None
        return self._identity

    # -- requests

    def submit(self, requests: Sequence[EngineRequest]) -> Stream:
        """The requests differ in their prompts alone. TargetUnavailable if no target is ready."""
        candidates = self._fleet.taking
        if not candidates:
            raise TargetUnavailable(self._absence(), self.health.retry_after)
        opened: list[OpenRequest] = []
        stream = Stream(len(requests), requests[0].params.n, lambda: self._abort(opened))
        stream.revise = partial(self._revise, opened)
        for place, request in enumerate(requests):
            opened.append(OpenRequest(stream, place, seeded(request)))
            self._send(opened[-1], candidates)
        return stream

    def _send(self, opened: OpenRequest, candidates: Sequence[Replica]) -> None:
        by_id, request = {replica.id: replica for replica in candidates}, opened.request
        if len(self._fleet.replicas) > 1:
            keys = routing_keys(request.cache_salt, request.tokens)
            asked = RouteRequest(len(request.tokens), keys, request.session)
            opened.route = self._fleet.routing.choose(asked, list(by_id))
        chosen = candidates[0] if opened.route is None else by_id[opened.route.replica]
        self._fleet.send(opened, chosen)

    def _abort(self, opened: Sequence[OpenRequest]) -> None:
        for request in opened:
            if not request.ended:
                request.withdrawn = True
                self._fleet.withdraw(request)

    def _revise(self, opened: Sequence[OpenRequest], max_nodes: int | None) -> None:
        for one in opened:
            one.request = msgspec.structs.replace(one.request, max_nodes=max_nodes)
            if not one.ended:
                self._fleet.revise(one)

    def _fail(self, request: OpenRequest, error: Exception) -> None:
        request.stream.fail(error)
        request.stream.abort()

    # -- what the fleet tells

    def failure(self, replica: Replica, failure: Failure) -> None:
        for number in failure.ids:
            if number in replica.requests:
                self._fail(self._fleet.ended(replica, number), error_of(failure))

    def lost(self, requests: Sequence[OpenRequest], reason: str) -> None:
        if not (self._fleet.alone or self._fleet.closed):
            logger.warning("%s; requests that go on elsewhere: %d", reason, len(requests))
        unavailable = TargetUnavailable(reason, self.health.retry_after)
        for request in requests:
            request.losses += 1
            if request.ended:  # its stream has failed
                continue
            if request.losses >= MAX_LOSSES:
                told = f"{MAX_LOSSES} targets were lost while they had it, the last one because {reason}"
                self._fail(request, EngineError(f"request: {told}; no other gets it"))
            elif self._fleet.closed or (self._fleet.alone and not self._fleet.taking):
                self._fail(request, unavailable)
            else:
                self._resume(request, unavailable)

    def moved(self, requests: Sequence[OpenRequest], reason: str) -> None:
        for request in requests:
            if not request.ended:
                self._resume(request, TargetUnavailable(reason, self.health.retry_after))

    def unfit(self, identity: Identity) -> str:
        for name, own in self._own.items():
            theirs = getattr(identity, name)
            if own and theirs and theirs != own:
                return f"its {name}, {theirs[:12]}, is not that of {self.name}, {own[:12]}"
        return ""

    def look(self) -> None:
        self._waiting = [request for request in self._waiting if self._still_waits(request)]

    def _still_waits(self, request: OpenRequest) -> bool:
        if request.ended or self._find_another(request):
            return False
        if expired := request.deadline is not None and time.monotonic() >= request.deadline:
            waited = f"no target took over within {self._server.resume_timeout:g} s"
            self._fail(request, TargetUnavailable(waited, self.health.retry_after))
        return not expired

    def _resume(self, request: OpenRequest, otherwise: Exception) -> None:
        if request.begun and not request.fingerprint:
            self._fail(request, otherwise)
        elif not self._find_another(request):
            request.deadline = time.monotonic() + self._server.resume_timeout
            self._waiting.append(request)

    def _find_another(self, request: OpenRequest) -> bool:
        fit = [r for r in self._fleet.taking if not request.begun or r.fingerprint == request.fingerprint]
        if fit:
            self.resumes += 1
            self._send(request, fit)
        return bool(fit)


def seeded(request: EngineRequest) -> EngineRequest:
    """Any target can go on with a request that has a seed."""
    if request.params.seed is not None:
        return request
    params = dataclasses.replace(request.params, seed=secrets.randbits(DRAWN_SEED_BITS))
    return msgspec.structs.replace(request, params=params)


def together(identities: Sequence[Identity]) -> Identity:
    """Limits that each target keeps; capacities of all."""
    least = {name: min(getattr(one, name) for one in identities) for name in ("context", "longest", "max_nodes")}
    sums = {name: sum(getattr(one, name) for one in identities) for name in ("kv_slots", "max_requests")}
    return msgspec.structs.replace(identities[0], **least, **sums)


def error_of(message: Failure) -> Exception:
    if message.field == "resumed":  # the server's own field
        return EngineError(f"request: {message.reason}")
    if message.field is not None:
        return ParameterError.described(message.field, message.reason)
    return PromptError(message.reason) if message.refused else EngineError(message.reason)
