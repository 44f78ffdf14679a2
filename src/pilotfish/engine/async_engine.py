"""The engine of a server: a target worker in a process of its own, and streams of what it commits."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pilotfish.config import EngineConfig, model_name
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.engine.launch import Delays, Supervisor, WorkerState
from pilotfish.engine.process import WorkerSpec
from pilotfish.engine.stream import Stream, Update
from pilotfish.errors import EngineError, ModelError, ParameterError, PromptError, TargetUnavailable, WireError
from pilotfish.wire.channel import Peer, Received
from pilotfish.wire.courier import Courier
from pilotfish.wire.listening import ListeningChannel
from pilotfish.wire.serving import (
    Abort,
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

#: Seconds without a word after which a target is not ready: it speaks after each step, and once a second.
SILENCE = 30.0
TARGET = "target"
#: Seconds that a target has to end: its drafts end before it.
GRACE = 10.0


@dataclass(frozen=True)
class Health:
    """Whether requests can be served, and what the target last said of itself."""

    ready: bool
    reason: str  # why not, one line; "" where ready
    restarts: int
    failed: bool  # whether it will not be started again
    status: Status | None


@dataclass(frozen=True)
class _Model:
    tokenizer: Any
    defaults: dict[str, Any]  # fields of SamplingParams


def _read(directory: Path) -> _Model:
    """What is to be known of a model outside its target. Imports transformers, which takes a while."""
    from pilotfish.model.generation_config import read_generation_config
    from pilotfish.model.tokenizer import load_tokenizer

    return _Model(load_tokenizer(directory), read_generation_config(directory).defaults)


class AsyncEngine:
    """`start`, `submit` from the same event loop, `close`. Where the target's process ends, its requests fail and it is
    started again."""

    def __init__(
        self, config: EngineConfig, options: Sequence[str] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        """The target's command line has further `options`."""
        self.config = config
        self.name = model_name(config.target)
        self.tokenizer: Any = None  # until `start`
        self.defaults: dict[str, Any] = {}
        #: Called with every Progress.
        self.observe: Callable[[Progress], None] = lambda _: None
        self._options = options
        self._clock = clock
        self._streams: dict[int, Stream] = {}
        self._next_id = 1
        self._peer: Peer | None = None  # the target that serves
        self._gone: Peer | None = None  # the one before it, of which a last word may still arrive
        self._status: Status | None = None  # what it last said
        self._heard = 0.0
        self._sequence = 0  # of its next Progress
        self._worker = WorkerState(TARGET)
        self._closed = False

    # -- requests

    @property
    def health(self) -> Health:
        silent = self._clock() - self._heard
        if self._peer is None:
            reason = self._absence()
        else:
            reason = f"target: silent for {silent:.0f} s" if silent > SILENCE else ""
        return Health(not reason, reason, self._worker.restarts, self._worker.status == "failed", self._status)

    def submit(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        cache_salt: str | None = None,
        max_nodes: int | None = None,
    ) -> Stream:
        """Have `params.n` outputs of a prompt made. TargetUnavailable where there is nobody to make them."""
        if self._peer is None or self._closed:
            raise TargetUnavailable(self._absence())
        request, self._next_id = self._next_id, self._next_id + 1
        stream = self._streams[request] = Stream(params.n, lambda: self._abort(request))
        self._post(Submit(request, list(tokens), params, cache_salt, max_nodes))
        return stream

    def _abort(self, request: int) -> None:
        if self._streams.pop(request, None) is not None:
            self._post(Abort(request))

    def _post(self, message: ToTarget) -> None:
        if self._peer is not None:
            self._courier.post(self._peer, msgspec.msgpack.encode(message))

    def _absence(self) -> str:
        if not self._worker.problem:
            return "target: loading"
        return f"{self._worker.problem}; it {'stays down' if self._worker.status == 'failed' else 'is started again'}"

    # -- the target's process

    async def start(self) -> None:
        """Start the target; read, while it loads, what is to be known here. `health` tells when it is ready. ModelError
        for a tokenizer or a generation_config.json that cannot be used; the rest is the target's."""
        self._loop = asyncio.get_running_loop()
        self._supervisor = Supervisor(Delays(grace=GRACE))
        endpoint = f"ipc://{self._supervisor.directory}/server"
        channel = ListeningChannel(endpoint, high_water=0)
        self._courier = Courier(channel, self._receive, self._look, period=0.05)
        self._courier.start()
        self._supervisor.start([WorkerSpec(TARGET, [*target_command(self.config, endpoint), *self._options])])
        model = await asyncio.to_thread(_read, self.config.target)
        self.tokenizer, self.defaults = model.tokenizer, model.defaults

    async def close(self) -> None:
        """End the target; streams that are open fail. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._lose("target: the server is shutting down")
        await asyncio.to_thread(self._supervisor.close)
        await asyncio.to_thread(self._courier.close)

    # -- the courier's thread

    def _receive(self, received: Received) -> None:
        try:
            message = decode_to_server(received.frame)
        except WireError as error:
            logger.error("the target sent no message: %s", error)
            return
        self._in_loop(lambda: self._handle(received.peer, message))

    def _look(self) -> None:
        """Whether the target's process has ended, or another one begun."""
        (state,) = self._supervisor.poll() or (self._worker,)
        if state != self._worker:
            self._in_loop(lambda: self._watch(state))

    def _in_loop(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)

    # -- in the loop

    def _watch(self, state: WorkerState) -> None:
        gone = state.pid != self._worker.pid and self._worker.pid is not None
        self._worker = state
        if gone:
            self._lose(self._absence())

    def _lose(self, reason: str) -> None:
        """The target is gone, and all it had."""
        self._gone = self._peer or self._gone
        self._peer = self._status = None
        self._end(list(self._streams), TargetUnavailable(reason))

    def _end(self, requests: Sequence[int], error: Exception) -> None:
        for request in requests:
            if (stream := self._streams.pop(request, None)) is not None:
                stream.fail(error)

    def _handle(self, peer: Peer, message: ToServer) -> None:
        if peer == self._gone:
            return
        if isinstance(message, Status) and peer != self._peer:
            self._lose("target: it was started anew")
            self._peer, self._sequence = peer, 0
        if peer != self._peer:
            return
        self._heard = self._clock()
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


def config_text(config: EngineConfig) -> str:
    """As JSON, for a process that is to run the same."""
    return msgspec.json.encode(config, enc_hook=str).decode()


def config_of(text: str) -> EngineConfig:
    """The configuration that `config_text` wrote; ParameterError for what is none."""
    try:
        return msgspec.json.decode(text, type=EngineConfig, dec_hook=_path)
    except msgspec.DecodeError as error:
        raise ParameterError("config", text, f"an engine's configuration ({error})") from error


def _path(kind: type, value: Any) -> Path:
    if kind is not Path:
        raise ModelError(f"config: {kind.__name__} cannot be read")
    return Path(value)
