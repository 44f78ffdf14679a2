"""A server that answers as a script says, in any framing."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from socketserver import StreamRequestHandler, ThreadingTCPServer
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


class ScriptedServer(ThreadingTCPServer):
    """A server in a thread that answers POSTs as a script says, and leaves connections open or closes them; `got` is
    its answer to GET `route`."""

    daemon_threads = True

    def __init__(
        self,
        script: Script = lambda *_: None,
        *,
        closes: bool = True,
        route: bytes = b"/v1/models",
        got: bytes = plain("200 OK", MODELS),
    ) -> None:
        super().__init__(("127.0.0.1", 0), Answering)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.script, self.closes, self.route, self.got = script, closes, route, got
        self.bodies, self.heads = list[dict[str, Any]](), list[bytes]()

    def __enter__(self) -> ScriptedServer:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class Answering(StreamRequestHandler):
    server: ScriptedServer

    def handle(self) -> None:
        head = b"".join(iter(self.rfile.readline, b"\r\n"))
        self.server.heads.append(head)
        if head.startswith(b"GET"):
            self.wfile.write(self.server.got if self.server.route in head else plain("404 Not Found", {}))
            return
        size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        self.server.bodies.append(json.loads(self.rfile.read(size)))
        answer = self.server.script(len(self.server.bodies) - 1, self.server.bodies[-1])
        if answer is None:
            self.server.__exit__()
            return
        self.wfile.write(answer)
        if not self.server.closes:
            self.rfile.read()  # until the client closes
