"""A server that answers as a script says, in any framing."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
MODELS = {"data": [{"id": "m", "owned_by": "somebody"}]}


def chunk(text: str = "", finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], **fields}


def usage(tokens: int, prompt: int = 5) -> dict[str, Any]:
    return {"choices": [], "usage": {"completion_tokens": tokens, "prompt_tokens": prompt}}


def sse(*events: dict[str, Any], done: bool = True, line: bytes = b"data: %b\n\n") -> bytes:
    found = b"".join(line % json.dumps(event).encode() for event in events)
    return found + (line % b"[DONE]" if done else b"")


def chunked(body: bytes, size: int = 7) -> bytes:
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    whole = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return HEAD + b"transfer-encoding: chunked\r\n\r\n" + whole + b"0\r\n\r\n"


def plain(status: str, body: Any) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


GOOD = sse(chunk("a b"), chunk(" c"), chunk(finish="stop"), usage(3))

#: Gives the bytes of the n-th answer to a POST; None: the server ends.
Script = Callable[[int, dict[str, Any]], bytes | None]


class ScriptedServer:
    """A server in a thread that answers as a script says, and leaves connections open or closes them."""

    def __init__(self, script: Script, *, closes: bool = True, models: bytes = plain("200 OK", MODELS)) -> None:
        self.url, self.bodies, self.heads = "", list[dict[str, Any]](), list[bytes]()
        self._script, self._closes, self._models = script, closes, models
        self._loop, self._ready = asyncio.new_event_loop(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10)

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._over.wait()
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        if head.startswith(b"GET"):
            answer: bytes | None = self._models if b"/v1/models" in head else plain("404 Not Found", {})
        else:
            size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            self.bodies.append(json.loads(await reader.readexactly(size)))
            answer = self._script(len(self.bodies) - 1, self.bodies[-1])
        if answer is None:
            self._server.close()
        writer.write(answer or b"")
        await writer.drain()
        if self._closes or answer is None or head.startswith(b"GET"):
            writer.close()
        else:
            await reader.read()  # until the client closes
            writer.close()
