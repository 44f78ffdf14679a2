"""A job's answer to its client: whole, or as server-sent events.

    data: {chunk}          each update, at once
    data: {"error": …}     where it broke after the first token; before that the status tells
    data: [DONE]           always the last one, after an error too: clients wait for it

A client that goes away ends the job; one that takes nothing is sent away by `protocol`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from msgspec import Struct
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pilotfish.server.answers import encode
from pilotfish.server.envelope import failed
from pilotfish.server.failures import ClientGone
from pilotfish.server.formats import Format
from pilotfish.server.job import Job, while_connected
from pilotfish.server.outputs import Outputs

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events
]


class JobResponse(Response):
    """Runs a job to its end, and closes it whatever happens."""

    def __init__(self, job: Job, outputs: Outputs, shape: Format, *, stream: bool) -> None:
        super().__init__()
        self._job, self._outputs, self._format = job, outputs, shape
        self._run = self._stream if stream else self._whole

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An error before anything was sent is raised; a client that is gone gets no answer."""
        ended: BaseException | None = None
        try:
            ended = await while_connected(receive, self._run(scope, receive, send))
        except ClientGone as error:
            ended = error
        except BaseException as error:
            ended = error
            raise
        finally:
            self._job.close(ended)

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> Exception | None:
        self._job.submit()
        async for growth in self._job:
            self._outputs.grow(growth)
        response = Response(encode(self._format.whole()), media_type="application/json")
        await response(scope, receive, send)
        return None

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> Exception | None:  # noqa: ARG002
        """What broke the stream after its first event; the client was told."""
        self._job.submit()
        events = self._events()
        first = await anext(events)
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._write(send, first)
        broken = None
        try:
            async for event in events:
                await self._write(send, event)
        except Exception as error:
            broken = error
            await self._write(send, encoded(failed(error, scope).body))
        await self._write(send, DONE)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return broken

    async def _events(self) -> AsyncIterator[bytes]:
        plan = self._job.plan
        async for growth in self._job:
            output = self._outputs.grow(growth)
            if output.started and (output.news or plan.every_update):
                yield b"".join(map(encoded, self._format.chunks(output, growth)))
                output.sent()
        if plan.usage:
            yield encoded(self._format.closing())

    async def _write(self, send: Send, data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})


def encoded(message: Struct) -> bytes:
    """One event."""
    return b"data: " + encode(message) + b"\n\n"
