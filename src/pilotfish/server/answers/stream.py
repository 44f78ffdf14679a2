"""The events of a streamed answer:

    data: {chunk}          each update, at once
    data: {"error": …}     where it broke after the first token; before that the status tells
    data: [DONE]           always the last one, after an error too: clients wait for it; not in newer APIs

A client that goes away ends the request; one that takes nothing is disconnected by `connections`."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

from msgspec.structs import replace
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pilotfish.core.scheduling.request import FinishReason
from pilotfish.engine.targets.stream import Submits, Updates
from pilotfish.server.answers.formats import AnswerFormat, OutputBuffer
from pilotfish.server.bodies.constraints import blaming
from pilotfish.server.http_errors import ClientGone, HttpError, encode
from pilotfish.server.middleware import recorded_error
from pilotfish.server.observe.request_records import RequestRecord
from pilotfish.wire.serving import Delta, EngineRequest, Finish

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events
]


def _without_output(delta: Delta) -> Delta:
    finish = delta.finish and Finish(FinishReason.LENGTH, None)
    return replace(delta, tokens=[], text="", ends=[], verified=[], logprobs=[], finish=finish)


class GenerationResponse(Response):
    def __init__(self, form: AnswerFormat, submit: Submits, record: RequestRecord) -> None:
        super().__init__()
        self._generation, self._format, self._submit, self._record = form.generation, form, submit, record
        self._stream: Updates | None = None  # until the request is submitted

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An error before the first byte is raised; a client that is gone gets no answer."""
        run = self._events if self._generation.body.stream else self._whole
        ended: BaseException | None = None
        try:
            ended = await while_connected(receive, run(scope, receive, send))
        except BaseException as error:
            ended = error
            if not isinstance(error, ClientGone):
                raise
        finally:
            if self._stream is not None:
                self._stream.abort()  # what still runs
            self._record.close(ended)

    async def _grown(self) -> AsyncIterator[OutputBuffer]:
        """HttpError 504 after the deadline, TargetUnavailable if the target is not ready; also the engine's errors."""
        given, only_echo = self._generation, self._generation.body.only_echo
        ends = asyncio.get_running_loop().time() + given.timeout
        others = given.params, given.cache_salt, given.choice.max_nodes, given.session, given.choice.variant.draft
        self._stream = self._submit([EngineRequest(prompt.tokens, *others) for prompt in given.prompts])
        self._record.submitted(self._stream)
        try:
            while True:
                async with asyncio.timeout_at(ends):
                    with blaming(given.reading.field):
                        update = await anext(self._stream)
                self._record.update(update.index, update.delta, time.monotonic())
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
        """Returns the error that broke the stream after its first event."""

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
