"""The engine of a server: a target in a process of its own, and a stream of updates for each request."""

from __future__ import annotations

import asyncio
import logging
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pilotfish.config import EngineConfig, config_text, model_name
from pilotfish.core.held_prefixes import Held
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.engine.attendance import Attendance
from pilotfish.engine.launch import Supervisor, WorkerState
from pilotfish.engine.process import WorkerSpec
from pilotfish.engine.silence import Silence
from pilotfish.engine.stream import Stream
from pilotfish.errors import EngineError, ParameterError, PromptError, TargetUnavailable, WireError
from pilotfish.wire.channel import ChannelThread, Received, decoded, encode
from pilotfish.wire.serving import (
    ATTEND,
    SERVER_DECODER,
    WAITING,
    Abort,
    Beat,
    Declined,
    Delta,
    Failure,
    Progress,
    Status,
    StepReport,
    Submit,
    ToServer,
    ToTarget,
)
from pilotfish.wire.sockets import DialingChannel

logger = logging.getLogger(__name__)

TARGET = "target"
#: The target's peer name on a server's channel.
PEER = b"0"
#: Seconds without a Beat after which a target is not ready, and seconds in one step.
SILENCE, LONG_STEP = 2.0, 30.0
#: Seconds in one step after which a target is killed; also seconds of silence while it loads, because some libraries
#: let no other thread run meanwhile.
ENDLESS = 300.0
#: Seconds after which a client should try a silent target again.
RETRY = 2.0
#: Seconds that a target has to end: to end its draft workers, and to write KV to disk (`kv.tiers.FLUSH`).
GRACE = 20.0
CLOSED = "draining: the server is shutting down"


@dataclass(frozen=True)
class Health:
    """Whether requests can be served, and the target's last status."""

    ready: bool
    reason: str  # why not ready, in one line; "" if ready
    retry_after: float  # seconds until requests may be served, estimated from the duration of the last start
    restarts: int
    failed: bool  # whether the target stays down
    status: Status | None


class AsyncEngine:
    """`start`, `submit` from the same event loop, `close`. If the target's process ends, its requests fail and it is
    started again. A silent target, such as a stopped process, keeps its requests; it is killed after `target_timeout`
    seconds."""

    def __init__(
        self,
        config: EngineConfig,
        target_timeout: float = 30.0,
        environment: Mapping[str, str] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`environment` is added to that of the target's process and of its draft workers."""
        self.config = config
        self.name = model_name(config.target)
        self.tokenizer: Any = None  # until `start`
        self.defaults: dict[str, Any] = {}  # the model's own sampling parameters, by SamplingParams' names
        self.observe: Callable[[StepReport, Sequence[Delta]], None] = lambda *_: None
        self._clock = clock
        self._streams: dict[int, Stream] = {}
        self._next_id = 1
        self._attendance = Attendance()  # to the target that serves
        self._last = ""  # incarnation of the target before it: its last messages may still arrive
        self._attended = -ATTEND  # when the last Attend left
        self._status: Status | None = None  # the last one
        self._silence = Silence()
        self._step = 0.0  # seconds that the target's step had lasted at the last Beat
        self._timeout = target_timeout
        self._environment = environment
        self._worker = WorkerState(TARGET)
        self._began = clock()  # when its process was started
        self._start_seconds: float | None = None  # that the last start took until the target was ready
        self._closed = False

    @property
    def _serving(self) -> bool:
        """Whether a target has said that it is ready."""
        return bool(self._attendance.incarnation)

    # -- requests

    @property
    def health(self) -> Health:
        reason, worker = self._obstacle(), self._worker
        retry = RETRY if self._serving else self._start_left()
        return Health(not reason, reason, retry, worker.restarts, worker.status == "failed", self._status)

    def _start_left(self) -> float:
        """Estimated seconds until the target is ready: as long as the last start; in the first, as long again as so
        far."""
        passed = self._clock() - self._began
        return passed if self._start_seconds is None else max(self._start_seconds - passed, 0.0)

    def _obstacle(self) -> str:
        """Why requests cannot be served; "" if they can."""
        if not self._serving:
            return self._absence()
        if self._silence.seconds > SILENCE:
            return f"target: silent for {self._silence.seconds:.0f} s"
        return f"target: in one step for {self._step:.0f} s" if self._step > LONG_STEP else ""

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        cache_salt: str | None = None,
        max_nodes: int | None = None,
    ) -> Stream:
        """Request `params.n` outputs of each prompt. TargetUnavailable if the target is not ready."""
        if reason := self._obstacle():
            raise TargetUnavailable(reason, self.health.retry_after)
        requests = range(self._next_id, self._next_id + len(prompts))
        self._next_id = requests.stop
        stream = Stream(requests, params.n, lambda: self._abort(requests))
        for request, tokens in zip(requests, prompts, strict=True):
            self._streams[request] = stream
            self._ask(Submit(request, self._attendance.incarnation, list(tokens), params, cache_salt, max_nodes))
        return stream

    def _abort(self, requests: range) -> None:
        for request in requests:
            if self._streams.pop(request, None) is not None:
                self._ask(Abort(request, self._attendance.incarnation))

    def _ask(self, message: Submit | Abort) -> None:
        if self._serving:
            self._attendance.sent += 1
            self._post(message)

    def _post(self, message: ToTarget) -> None:
        self._channel_thread.post(PEER, encode(message))

    def _absence(self) -> str:
        failed, problem = self._worker.status == "failed", self._worker.problem
        if self._closed and not failed:
            return CLOSED
        return f"{problem}; it {'stays down' if failed else 'is started again'}" if problem else "target: loading"

    # -- the target's process

    async def start(self) -> None:
        """Start the target, and load the tokenizer meanwhile. `health` tells when the target is ready. ModelError for a
        tokenizer or a generation_config.json that cannot be used; `health` tells of other problems with the model."""
        self._loop = asyncio.get_running_loop()
        self._supervisor = Supervisor(GRACE, lambda state: self._in_loop(lambda: self._note_state(state)))
        endpoint = f"ipc://{self._supervisor.directory}/target-0"
        channel = DialingChannel((endpoint,), secrets.token_bytes(8), high_water=WAITING, role="target")
        self._channel_thread = ChannelThread(channel)
        self._channel_thread.start(self._receive, self._tick)
        options = (f"--listen={endpoint}", f"--config={config_text(self.config)}")
        command = [sys.executable, "-m", "pilotfish", "target", *options]
        self._supervisor.start([WorkerSpec(TARGET, command, environment=self._environment)])
        await asyncio.to_thread(self._read_model)

    def _read_model(self) -> None:
        from pilotfish.model.metadata import load_tokenizer, log_through_root, read_generation_config  # takes seconds

        log_through_root()
        self.tokenizer = load_tokenizer(self.config.target)
        self.defaults = read_generation_config(self.config.target).defaults

    async def close(self) -> None:
        """End the target; open streams fail. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._drop_target(CLOSED)
        await asyncio.to_thread(self._supervisor.close)
        await asyncio.to_thread(self._channel_thread.close)

    # -- the channel's thread

    def _receive(self, received: Received) -> None:
        try:
            message = decoded(SERVER_DECODER, received.frame)
        except WireError as error:
            logger.error("the target sent no message: %s", error)
            return
        if isinstance(message, Beat) and message.pid == self._worker.pid:
            self._silence.heard()
            self._step = message.step
        self._in_loop(lambda: self._handle(message))

    def _tick(self) -> None:
        self._in_loop(self._attend)
        self._look()

    def _look(self) -> None:
        """Kill a target that stands still."""
        runs = self._worker.pid is not None
        # The limit is read before the silence: a target that gets ready in between has just been heard.
        limit = self._timeout if self._serving else ENDLESS
        silent = self._silence.look(self._clock())
        if runs and silent > limit:
            self._supervisor.kill(TARGET, f"was silent for {limit:g} s and is killed")
        elif runs and self._step > ENDLESS:
            self._supervisor.kill(TARGET, f"was in one step for {ENDLESS:g} s and is killed")

    def _in_loop(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)

    # -- in the loop

    def _attend(self) -> None:
        """Often until there is a target; then as often as it needs to know that this server lives."""
        now = self._clock()
        if not self._closed and (not self._serving or now - self._attended >= ATTEND):
            self._attended = now
            self._post(self._attendance.attend())

    def _note_state(self, state: WorkerState) -> None:
        gone = state.pid is None and self._worker.pid is not None
        if state.pid != self._worker.pid:
            self._began = self._clock()
            self._silence, self._step = Silence(), 0.0
        self._worker = state
        if gone:
            self._drop_target(self._absence())

    def _drop_target(self, reason: str) -> None:
        """The target is gone; fail its requests."""
        self._last = self._attendance.incarnation or self._last
        self._attendance = Attendance()
        self._status = self._status if self._closed else None  # while the server drains, routes still read it
        self._fail(list(self._streams), TargetUnavailable(reason, self.health.retry_after))

    def _fail(self, requests: Sequence[int], error: Exception) -> None:
        for request in requests:
            if (stream := self._streams.pop(request, None)) is not None:
                stream.fail(error)

    def _handle(self, message: ToServer) -> None:
        if isinstance(message, Status):
            self._take_status(message)
        elif isinstance(message, Declined):
            logger.error("the target declines: %s", message.reason)
        elif not self._serving or isinstance(message, Held):
            return
        elif isinstance(message, Beat):
            if message.incarnation == self._attendance.incarnation and not self._attendance.follows(message):
                self._lose_requests()
        else:
            if not self._attendance.follows(message):
                self._lose_requests()
            if isinstance(message, Progress):
                self._progress(message)
            else:
                self._fail(message.ids, error_of(message))

    def _take_status(self, status: Status) -> None:
        if status.incarnation == self._last:
            return
        if status.incarnation != self._attendance.incarnation:
            self._drop_target("target: it was started anew")
            self._silence.heard()
            self._attendance = Attendance(status.incarnation)
            self._start_seconds = self._clock() - self._began
        self._status = status

    def _lose_requests(self) -> None:
        """Messages were lost, with unknown tokens of any request, or all requests have ended."""
        for request in list(self._streams):
            self._ask(Abort(request, self._attendance.incarnation))
        self._fail(list(self._streams), TargetUnavailable("target: the connection to it broke off"))

    def _progress(self, progress: Progress) -> None:
        self.observe(progress.step, progress.deltas)
        for delta in progress.deltas:
            stream = self._streams.get(delta.id)
            if stream is not None:
                stream.add(delta, progress.step)
                if not stream.open:
                    for request in stream.requests:
                        self._streams.pop(request, None)


def error_of(message: Failure) -> Exception:
    """The error that the target's engine raised."""
    if message.field is not None:
        return ParameterError.described(message.field, message.reason)
    return PromptError(message.reason) if message.refused else EngineError(message.reason)
