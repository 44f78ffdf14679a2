"""A request under way: the engine's updates of its outputs, and its answer, whole or as server-sent events.

    data: {chunk}          each update, at once
    data: {"error": …}     where it broke after the first token; before that the status tells
    data: [DONE]           always the last one, after an error too: clients wait for it

These are OpenAI's older APIs'; a format of another API writes its own.

A client that goes away ends the request; one that takes nothing is disconnected by `http`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pilotfish.core.prefilling.handover import HandOverReport
from pilotfish.core.scheduling.request import FinishReason
from pilotfish.engine.targets.stream import Submits, Updates
from pilotfish.grammar.parsers.pieces import Content, ContentParser, OutputParser, Piece
from pilotfish.server.bodies.constraints import blaming
from pilotfish.server.bodies.params import TokenizedPrompt
from pilotfish.server.http import recorded_error
from pilotfish.server.http_errors import ClientGone, HttpError, encode, http_error
from pilotfish.server.observe.request_records import RequestRecord
from pilotfish.wire.serving import Delta, EngineRequest, Finish, StepReport, Verified

if TYPE_CHECKING:  # OpenTelemetry is imported only where requests are traced
    from pilotfish.server.answers.formats import AnswerFormat
    from pilotfish.server.limits import Reservation
    from pilotfish.server.observe.tracing import RequestSpan
    from pilotfish.server.traffic.capture import PendingCapture
    from pilotfish.server.traffic.rollout import GuidedRequest

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events
]


@dataclass
class OutputBuffer:
    """An output of a prompt. `pieces`, `token_ids`, `logprobs` and `offsets` have not been sent to the client yet."""

    index: int
    prompt: TokenizedPrompt
    parser: OutputParser = field(default_factory=ContentParser)
    pieces: list[Piece] = field(default_factory=list)  # of the text
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)  # as its format has written them
    offsets: list[int] = field(default_factory=list)  # characters of the whole output's text before each token
    begun: bool = False  # the client has been sent something
    tokens: int = 0
    end: int = 0  # characters of the whole output's text
    seed: int | None = None
    cached: dict[str, int] = field(default_factory=dict)  # tokens of the prompt whose KV was there, by tier
    finish: Finish | None = None  # once it has ended
    prompt_logprobs: list[msgspec.Raw] = field(default_factory=list)
    verified: list[Verified] = field(default_factory=list)
    handovers: list[HandOverReport] = field(default_factory=list)
    delta: Delta | None = None  # the newest
    steps: Sequence[StepReport] = ()  # behind it

    def add(self, delta: Delta, steps: Sequence[StepReport]) -> None:
        self.delta, self.steps = delta, steps
        self.read(delta)
        self.token_ids += delta.tokens
        if delta.ends:
            self.offsets += (self.end, *delta.ends[:-1])
            self.end = delta.ends[-1]
        self.tokens += len(delta.tokens)
        self.seed = delta.seed if self.seed is None else self.seed
        self.cached = self.cached or delta.cached
        self.finish = delta.finish
        self.verified += delta.verified
        self.handovers += delta.handovers

    def read(self, delta: Delta) -> None:
        """Make pieces of its text."""
        self.pieces += self.parser.feed(delta.text)
        if delta.finish is not None:
            self.pieces += self.parser.finish()

    def clear(self) -> None:
        """The client was sent all of it."""
        self.begun = True
        self.pieces.clear()
        self.token_ids.clear()
        self.logprobs.clear()
        self.offsets.clear()

    @property
    def started(self) -> bool:
        """False while the engine scores a prompt, part by part: the first event has all of it."""
        return self.tokens > 0 or self.finish is not None

    @property
    def has_news(self) -> bool:
        """Whether there is something to send: tokens can end within a character, or where a stop string or a call may
        begin."""
        return not self.begun or self.finish is not None or bool(self.logprobs) or bool(self.pieces)

    @property
    def content(self) -> str:
        return "".join(piece.text for piece in self.pieces if isinstance(piece, Content))


class RequestHandle:
    """An admitted request, and its metrics and trace."""

    def __init__(
        self,
        reservation: Reservation,
        record: RequestRecord,
        span: RequestSpan | None,
        guided: GuidedRequest,
        capture: PendingCapture | None = None,
    ) -> None:
        self.record, self.guided = record, guided
        self._reservation, self._span, self._capture = reservation, span, capture

    def submitted(self, stream: Updates) -> None:
        """The engine has the request."""
        self.guided.submitted(stream)

    def update(self, index: int, delta: Delta) -> None:
        """`delta` was added to output `index`, counted over all prompts."""
        self.record.update(index, delta, time.monotonic())
        self.guided.update(delta)
        if self._capture is not None:
            self._capture.update(index, delta)
        if self._span is not None:
            self._span.update(index, delta)

    def close(self, error: BaseException | None) -> None:
        """The request has ended. Called once."""
        gone = isinstance(error, ClientGone | asyncio.CancelledError)
        reason = None if error is None else FinishReason.ABORT if gone else FinishReason.ERROR
        self.record.finish(time.monotonic(), reason)
        self.guided.close()
        if self._capture is not None:
            self._capture.close(self.record.reason)
        self._reservation.release(self.record.facts.prompt_tokens + self.record.generation_tokens)
        if self._span is not None:
            status = 200 if error is None else 499 if gone else http_error(error).status
            self._span.end(status, self.record)


def _without_output(delta: Delta) -> Delta:
    """For a request that wants only its prompt: one token is generated, and dropped."""
    finish = delta.finish and Finish(FinishReason.LENGTH, None)
    return msgspec.structs.replace(delta, tokens=[], text="", ends=[], verified=[], logprobs=[], finish=finish)


class GenerationResponse(Response):
    """Runs an admitted request to its end, and closes it whatever happens."""

    def __init__(self, form: AnswerFormat, engine: Submits, handle: RequestHandle) -> None:
        super().__init__()
        self._generation, self._format, self._engine, self._handle = form.generation, form, engine, handle
        self._stream: Updates | None = None  # until the request is submitted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An error before anything was sent is raised; a client that is gone gets no answer."""
        run = self._events if self._generation.body.stream else self._whole
        ended: BaseException | None = None
        try:
            ended = await while_connected(receive, run(scope, receive, send))
        except ClientGone as error:
            ended = error
        except BaseException as error:
            ended = error
            raise
        finally:
            if self._stream is not None:
                self._stream.abort()  # what still runs
            self._handle.close(ended)

    async def _grown(self) -> AsyncIterator[OutputBuffer]:
        """Submit the request, and give each output that has grown. HttpError 504 after the deadline, TargetUnavailable
        if the target is not ready; also raises what the engine's stream does."""
        given, only_echo = self._generation, self._generation.body.only_echo
        ends = asyncio.get_running_loop().time() + given.timeout
        guesses = given.choice
        others = given.params, given.cache_salt, guesses.max_nodes, given.session, guesses.draft
        self._stream = self._engine.submit([EngineRequest(prompt.tokens, *others) for prompt in given.prompts])
        self._handle.submitted(self._stream)
        try:
            while True:
                async with asyncio.timeout_at(ends):
                    with blaming(given.reading.field):
                        update = await anext(self._stream)
                self._handle.update(update.index, update.delta)
                output = self._format.outputs[update.index]
                self._format.take(output, _without_output(update.delta) if only_echo else update.delta, update.steps)
                yield output
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            message = f"timeout: the request took more than {given.timeout:g} s"
            raise HttpError(504, message, "timeout", "timeout", "timeout") from error

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> Exception | None:
        async for _ in self._grown():
            pass
        response = Response(encode(self._format.whole()), media_type="application/json")
        await response(scope, receive, send)
        return None

    async def _events(self, scope: Scope, receive: Receive, send: Send) -> Exception | None:  # noqa: ARG002
        """Returns the error that broke the stream after its first event, of which the client was told."""

        async def write(data: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        chunks = self._chunks()
        first = await anext(chunks)
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await write(first)
        broken = None
        try:
            async for chunk in chunks:
                await write(chunk)
        except Exception as error:
            broken = error
            await write(self._written(self._format.failure(recorded_error(error, scope))))
        await write(self._format.end_of_stream, more=False)
        return broken

    async def _chunks(self) -> AsyncIterator[bytes]:
        async for output in self._grown():
            if output.started and (self._format.every_update or output.has_news):
                yield self._written(self._format.chunks(output))
                output.clear()
        if self._format.options.include_usage:
            yield self._written([self._format.closing()])

    def _written(self, events: Sequence[dict[str, Any]]) -> bytes:
        return b"".join(map(self._format.encoded, events))


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Exception | None]) -> Exception | None:
    """The result of `work`, which is cancelled, and ClientGone raised, once the client is gone."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
