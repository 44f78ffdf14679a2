"""A stand-in for the server: the playground's files, and scripted answers in the server's format."""

import asyncio
import json
import random
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pilotfish.core.prefilling.handover import HandOverReport
from pilotfish.server.application import page_routes

MODEL = "stand-in"
STORY = """    total = 0.0
    count = 0
    for value in values:
        total += value
        count += 1
    if not count:
        raise ValueError("mean of an empty sequence")
    return total / count


def variance(values):
    \"\"\"Return the variance.\"\"\"
    middle = mean(values)
    return mean((value - middle) ** 2 for value in values)


def deviation(values):
    \"\"\"Return the standard deviation.\"\"\"
    return variance(values) ** 0.5
"""


def event(chunk: Any) -> bytes:
    return f"data: {json.dumps(chunk, ensure_ascii=False)}\n\n".encode()


DONE = b"data: [DONE]\n\n"


def error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "server_error", "param": None, "code": None}}


def chunk(
    text: str,
    tokens: Sequence[int],
    ends: Sequence[int],
    accepted: int,
    nodes: int,
    at: float = 0.0,
    pushes: Sequence[dict[str, Any]] = (),
    handovers: Sequence[HandOverReport] = (),
) -> dict[str, Any]:
    """A verify step's part of an answer, as /v1/completions streams it."""
    verified = {"at": at, "tokens": len(tokens), "nodes": nodes, "accepted": accepted}
    times = {"at": at, "draft": 0.0005, "forward": 0.018, "verify": 0.002, "coordination": 0.001}
    counts = {"sequences": 1, "rows": nodes + 1, "nodes": nodes, "accepted": accepted, "committed": len(tokens)}
    step = {**times, **counts, "hits": 0, "pushes": list(pushes)}
    reports = [report.as_json() for report in handovers]
    detail = {"tokens": list(tokens), "ends": list(ends), "verified": [verified], "steps": [step], "handovers": reports}
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
    return {"id": "cmpl-1", "object": "text_completion", "model": MODEL, "choices": [choice], "pilotfish": detail}


def last(
    prompt_tokens: int,
    completion_tokens: int,
    reason: str = "length",
    cached: dict[str, int] | None = None,
    **metrics: Any,
) -> list[dict[str, Any]]:
    """The chunk with the finish reason, and the one with the usage. `cached`: tokens of the prompt by tier; `metrics`:
    further ones."""
    choice = {"index": 0, "text": "", "logprobs": None, "finish_reason": reason}
    head = {"id": "cmpl-1", "object": "text_completion", "model": MODEL}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    known = {"speculative_decoding": None, "cached_by_tier": cached, **metrics}
    told = {} if cached is None else {"metrics": known}
    return [{**head, "choices": [choice]}, {**head, "choices": [], "usage": usage, **told}]


#: Of 4,000 tokens of a prompt: the transfer goes on for 20 ms after the pool has computed.
HANDED = HandOverReport("prefill 0", "shm", "whole", 99.6, 0.4, 0.08, 0.3, 0.12, 0.05, size=1 << 22, tokens=3999)


def story(handovers: Sequence[HandOverReport] = ()) -> list[bytes]:
    """A longer answer in mode async, 22 ms a step, after hand-overs."""
    draw = random.Random(7)
    parts = re.findall(r"\s*\w+|\s*[^\w\s]+|\s+", STORY)
    events, position, written, at = [], 0, 0, 100.0
    while position < len(parts):
        accepted = min(draw.choice([0, 1, 2, 3, 3, 4, 5]), len(parts) - position - 1)
        taken = parts[position : position + accepted + 1]
        ends = [written + sum(map(len, taken[: i + 1])) for i in range(len(taken))]
        nodes = draw.randint(max(accepted, 4), 16)
        pushes = [{"at": at - 0.022 + 0.0073 * i, "nodes": draw.randint(1, 6)} for i in range(3)]
        tokens = [1000 + position + i for i in range(len(taken))]
        first = handovers if position == 0 else ()
        events.append(event(chunk("".join(taken), tokens, ends, accepted, nodes, at, pushes, first)))
        position, written, at = position + len(taken), ends[-1], at + 0.022
    prompt, handed = (4000, {"cached": {}, "handed_over": 3999}) if handovers else (14, {})
    return [*events, *map(event, last(prompt, len(parts), "stop", **handed)), DONE]


class StandIn:
    """Answers with `parts`, bytes as they are to be sent, `pause` seconds apart."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forgets what it was asked and told."""
        self.parts: list[bytes] = []
        self.pause = 0.0
        self.hold = False  # whether the stream stays open after the last piece
        self.refusal: tuple[int, Any] | None = None  # status and body instead of a stream
        self.pools: list[dict[str, Any]] = []
        self.chat = False  # whether its model's chat template marks turns
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.aborted = threading.Event()

    def app(self) -> Starlette:
        answers = [Route(f"/v1/{path}", self._answer, methods=["POST"]) for path in ("completions", "chat/completions")]
        told = [Route("/v1/models", self._models), Route("/v1/drafts", self._drafts)]
        return Starlette(routes=[*page_routes(), *told, *answers])

    async def _drafts(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": self.pools})

    async def _models(self, _: Request) -> Response:
        if self.refusal is not None:
            return self._refuse(*self.refusal)
        return JSONResponse({"object": "list", "data": [{"id": MODEL, "object": "model", "chat": self.chat}]})

    async def _answer(self, request: Request) -> Response:
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        self.paths.append(request.url.path)
        if self.refusal is not None:
            return self._refuse(*self.refusal)
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    def _refuse(self, status: int, content: Any) -> Response:
        return JSONResponse(content, status_code=status)

    async def _stream(self) -> AsyncIterator[bytes]:
        aborted = self.aborted
        try:
            for piece in self.parts:
                yield piece
                await asyncio.sleep(self.pause)
            if self.hold:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            aborted.set()
            raise


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Serves an ASGI application on a free port of the loopback, in a thread. Yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1, lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()
