"""The engine of a server: a target worker in a process of its own, and streams of what it commits."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from pilotfish.config import EngineConfig, config_text, model_name
from pilotfish.core.messages import Peer
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.engine.launch import Delays, Supervisor, WorkerState
from pilotfish.engine.liveness import Silence, StartTime
from pilotfish.engine.process import WorkerSpec
from pilotfish.engine.stream import Stream, Update
from pilotfish.errors import EngineError, ParameterError, PromptError, TargetUnavailable, WireError
from pilotfish.wire.channel import ChannelThread, Received
from pilotfish.wire.listening import ListeningChannel
from pilotfish.wire.serving import (
    Abort,
    Beat,
    Failure,
    Progress,
    Refusal,
    Status,
    Submit,
    ToServer,
    ToTarget,
    decode_to_server,
)

logger = logging.getLogger(__name__)

TARGET = "target"
#: Seconds without a Beat after which a target is not ready, and seconds in one step.
SILENCE, LONG_STEP = 2.0, 30.0
#: Seconds in one step after which a target is killed; also of silence while it loads, for libraries that let no other
#: thread run meanwhile.
ENDLESS = 300.0
#: Seconds after which a target that is silent may well be there again.
RETRY = 2.0
#: Seconds that a target has to end: its drafts end before it.
GRACE = 10.0
CLOSED = "draining: the server is shutting down"


@dataclass(frozen=True)
class Health:
    """Whether requests can be served, and what the target last said of itself."""

    ready: bool
    reason: str  # why not, one line; "" where ready
    retry_after: float  # seconds after which they may be, estimated from how long the last start took
    restarts: int
    failed: bool  # whether it will not be started again
    status: Status | None


@dataclass(frozen=True)
class _Model:
    tokenizer: Any
    defaults: dict[str, Any]  # fields of SamplingParams


def _read(directory: Path) -> _Model:
    """What is to be known of a model outside its target. Imports transformers, which takes a while."""
    from pilotfish.model.metadata import load_tokenizer, log_through_root, read_generation_config

    log_through_root()
    return _Model(load_tokenizer(directory), read_generation_config(directory).defaults)


class AsyncEngine:
    """`start`, `submit` from the same event loop, `close`. Where the target's process ends, its requests fail and it is
    started again. One that is silent, as a stopped process is, keeps its requests and goes on with them, if it speaks
    again within `target_timeout` seconds; then it is killed."""

    def __init__(
        self,
        config: EngineConfig,
        target_timeout: float = 30.0,
        environment: Mapping[str, str] = MappingProxyType({}),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`environment` is added to that of the target's process, and of those that it starts."""
        self.config = config
        self.name = model_name(config.target)
        self.tokenizer: Any = None  # until `start`
        self.defaults: dict[str, Any] = {}
        #: Called with every Progress.
        self.observe: Callable[[Progress], None] = lambda _: None
        self._clock = clock
        self._streams: dict[int, Stream] = {}
        self._next_id = 1
        self._peer: Peer | None = None  # the target that serves
        self._gone: Peer | None = None  # the one before it, of which a last word may still arrive
        self._status: Status | None = None  # what it last said
        self._silence = Silence()
        self._step = 0.0  # seconds that its step had lasted at the last Beat
        self._timeout = target_timeout
        self._environment = environment
        self._sequence = 0  # of its next Progress
        self._worker = WorkerState(TARGET)
        self._start = StartTime(clock())
        self._closed = False

    # -- requests

    @property
    def health(self) -> Health:
        reason, worker = self._reason(), self._worker
        retry = RETRY if self._peer is not None else self._start.left(self._clock())
        return Health(not reason, reason, retry, worker.restarts, worker.status == "failed", self._status)

    def _reason(self) -> str:
        """Why requests cannot be served; "" where they can."""
        if self._peer is None:
            return self._absence()
        if self._silence.seconds > SILENCE:
            return f"target: silent for {self._silence.seconds:.0f} s"
        return f"target: in one step for {self._step:.0f} s" if self._step > LONG_STEP else ""

    def submit(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        cache_salt: str | None = None,
        max_nodes: int | None = None,
    ) -> Stream:
        """Have `params.n` outputs of a prompt made. TargetUnavailable where there is nobody to make them."""
        if reason := self._reason():
            raise TargetUnavailable(reason, self.health.retry_after)
        request, self._next_id = self._next_id, self._next_id + 1
        stream = self._streams[request] = Stream(params.n, lambda: self._abort(request))
        self._post(Submit(request, list(tokens), params, cache_salt, max_nodes))
        return stream

    def _abort(self, request: int) -> None:
        if self._streams.pop(request, None) is not None:
            self._post(Abort(request))

    def _post(self, message: ToTarget) -> None:
        if self._peer is not None:
            self._channel_thread.post(self._peer, msgspec.msgpack.encode(message))

    def _absence(self) -> str:
        failed, problem = self._worker.status == "failed", self._worker.problem
        if self._closed and not failed:
            return CLOSED
        return f"{problem}; it {'stays down' if failed else 'is started again'}" if problem else "target: loading"

    # -- the target's process

    async def start(self) -> None:
        """Start the target; read, while it loads, what is to be known here. `health` tells when it is ready. ModelError
        for a tokenizer or a generation_config.json that cannot be used; the rest is the target's."""
        self._loop = asyncio.get_running_loop()
        self._supervisor = Supervisor(Delays(grace=GRACE))
        endpoint = f"ipc://{self._supervisor.directory}/server"
        channel = ListeningChannel(endpoint, high_water=0)
        self._channel_thread = ChannelThread(channel, self._receive, self._look, period=0.05)
        self._channel_thread.start()
        command = target_command(self.config, endpoint)
        self._supervisor.start([WorkerSpec(TARGET, command, environment=self._environment)])
        model = await asyncio.to_thread(_read, self.config.target)
        self.tokenizer, self.defaults = model.tokenizer, model.defaults

    async def close(self) -> None:
        """End the target; streams that are open fail. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._lose(CLOSED)
        await asyncio.to_thread(self._supervisor.close)
        await asyncio.to_thread(self._channel_thread.close)

    # -- the channel's thread

    def _receive(self, received: Received) -> None:
        try:
            message = decode_to_server(received.frame)
        except WireError as error:
            logger.error("the target sent no message: %s", error)
            return
        if isinstance(message, Beat):
            self._beat(message)
            return
        self._in_loop(lambda: self._handle(received.peer, message))

    def _beat(self, beat: Beat) -> None:
        if beat.pid == self._worker.pid:
            self._silence.heard()
            self._step = beat.step

    def _look(self) -> None:
        """Whether the target's process has ended, another one begun, or it stands still."""
        (state,) = self._supervisor.poll() or (self._worker,)
        if state != self._worker:
            self._silence, self._step = Silence(), 0.0
            self._in_loop(lambda: self._watch(state))
        limit = ENDLESS if self._peer is None else self._timeout  # first: the silence of one that is ready is short
        silent = self._silence.look(self._clock())
        if state.pid is not None and silent > limit:
            self._supervisor.kill(TARGET, f"was silent for {limit:g} s and is killed")
        elif state.pid is not None and self._step > ENDLESS:
            self._supervisor.kill(TARGET, f"was in one step for {ENDLESS:g} s and is killed")

    def _in_loop(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)

    # -- in the loop

    def _watch(self, state: WorkerState) -> None:
        gone = state.pid != self._worker.pid and self._worker.pid is not None
        if state.pid != self._worker.pid:
            self._start.begin(self._clock())
        self._worker = state
        if gone:
            self._lose(self._absence())

    def _lose(self, reason: str) -> None:
        """The target is gone, and all it had."""
        self._gone = self._peer or self._gone
        self._peer = None
        self._status = self._status if self._closed else None  # what it was, for those who still ask
        self._end(list(self._streams), TargetUnavailable(reason, self.health.retry_after))

    def _end(self, requests: Sequence[int], error: Exception) -> None:
        for request in requests:
            if (stream := self._streams.pop(request, None)) is not None:
                stream.fail(error)

    def _handle(self, peer: Peer, message: ToServer) -> None:
        if peer == self._gone:
            return
        if isinstance(message, Status) and peer != self._peer:
            self._lose("target: it was started anew")
            self._silence.heard()
            self._peer, self._sequence = peer, 0
            self._start.end(self._clock())
        if peer != self._peer:
            return
        if isinstance(message, Status):
            self._status = message
        elif isinstance(message, Progress):
            self._progress(message)
        elif isinstance(message, Refusal):
            self._end([message.id], refusal(message))
        else:
            assert isinstance(message, Failure)
            self._end(message.ids, EngineError(message.reason))

    def _progress(self, progress: Progress) -> None:
        if progress.sequence != self._sequence:  # some were lost: nobody can tell which tokens are missing
            for request in list(self._streams):
                self._post(Abort(request))
            self._end(list(self._streams), TargetUnavailable("target: the connection to it broke off"))
        self._sequence = progress.sequence + 1
        self.observe(progress)
        for delta in progress.deltas:
            stream = self._streams.get(delta.id)
            if stream is not None:
                stream.add(Update(delta, (progress.step,)))
                if not stream.open:
                    del self._streams[delta.id]


def refusal(message: Refusal) -> PromptError | ParameterError:
    """The error that the target's engine raised."""
    if message.field is None:
        return PromptError(message.message)
    return ParameterError.described(message.field, message.message)


def target_command(config: EngineConfig, endpoint: str) -> list[str]:
    """How a target worker is started."""
    return [sys.executable, "-m", "pilotfish", "target", f"--connect={endpoint}", f"--config={config_text(config)}"]
