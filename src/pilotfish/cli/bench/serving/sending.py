"""Sends the sessions of a load, and notes what comes back."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pilotfish.cli.bench.serving.client import Answer, Exchange
from pilotfish.cli.bench.serving.endpoint import ServedEndpoint
from pilotfish.cli.bench.serving.reading import error_of, reply_of
from pilotfish.cli.bench.serving.requests import Message, RequestSession, ServerRequest


@dataclass(frozen=True)
class Sent:
    request: ServerRequest
    due: float  # when it was to be sent, a moment of the host's monotonic clock
    began: float  # when the client began to connect
    over: float
    exchange: Exchange | None  # None where there is no answer
    error: str = ""  # why

    def answer(self) -> Answer:
        if self.exchange is None:
            return Answer((), self.began, self.over)
        return Answer(self.exchange.parts, self.exchange.sent, self.exchange.closed)


class Sending:
    """One load; `done` is called for each request that is over. Nothing is sent once the endpoint has broken off."""

    def __init__(self, endpoint: ServedEndpoint, timeout: float, done: Callable[[], None]) -> None:
        self.sent: list[Sent] = []
        self.broken = ""  # why the endpoint is given up
        self._endpoint, self._timeout, self._done = endpoint, timeout, done

    async def closed(self, sessions: Sequence[RequestSession], concurrency: int) -> None:
        waiting = iter(sessions)

        async def worker() -> None:
            for session in waiting:
                await self._play(session, time.perf_counter())

        await self._all([worker() for _ in range(concurrency)])

    async def open(self, sessions: Sequence[RequestSession], times: Sequence[float]) -> None:
        """Each session at its time, in seconds from now."""
        began = time.perf_counter()

        async def later(session: RequestSession, at: float) -> None:
            await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
            await self._play(session, began + at)

        await self._all([later(session, at) for session, at in zip(sessions, times, strict=True)])

    async def _all(self, tasks: Sequence[object]) -> None:
        """Ctrl-C ends it; what has come so far stays."""
        try:
            await asyncio.gather(*tasks)  # type: ignore[call-overload]
        except asyncio.CancelledError:
            self.broken = self.broken or "interrupted"

    async def _play(self, session: RequestSession, due: float) -> None:
        """Turn by turn. Nothing follows a turn that has failed."""
        history: list[Message] = []
        for request in session.turns:
            if self.broken:
                return
            sent = await self._send(request, history, due)
            self.sent.append(sent)
            self._done()
            due = sent.over
            if request is session.turns[-1]:
                return
            answer = sent.answer()
            if error_of(answer):
                return
            history = [*history, *request.messages, reply_of(answer)]

    async def _send(self, request: ServerRequest, history: Sequence[Message], due: float) -> Sent:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self._timeout):
                spoken = await self._endpoint.send(request, history)
            sent = Sent(request, due, began, spoken.closed, spoken)
        except OSError as error:  # a timeout is one
            late = f"no end after {self._timeout:g} s"
            why = late if isinstance(error, TimeoutError) else f"connection: {error.strerror or error}"
            await self._check()
            return Sent(request, due, began, time.perf_counter(), None, why)
        if not spoken.whole and error_of(sent.answer()):
            await self._check()
        return sent

    async def _check(self) -> None:
        """After a connection that was lost: whether the server is."""
        if why := await self._endpoint.gone():
            self.broken = why
