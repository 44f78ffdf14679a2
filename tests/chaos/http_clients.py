"""Clients of a live server, well-behaved and not: requests in threads, and bare sockets."""

import json
import socket
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import support
from live import HttpServer
from support import SNIPPETS

COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}
#: Seconds after which a test gives up.
LIMIT = 60.0


def completion(number: int = 0, **fields: Any) -> dict[str, Any]:
    """A request of its own for each number, greedy or not."""
    prompt, temperature = SNIPPETS[number % len(SNIPPETS)], 0.8 * (number % 2)
    fixed = {"prompt": prompt, "temperature": temperature, "seed": number, "ignore_eos": True, "max_tokens": 48}
    return {**fixed, **fields}


@dataclass
class Answer:
    """What a client was sent."""

    status: int
    headers: dict[str, str]
    events: list[Any] = field(default_factory=list)  # of a stream, [DONE] as it stands
    body: Any = None  # of another answer

    @property
    def text(self) -> str:
        if self.body is not None:
            return str(self.body["choices"][0]["text"])
        chunks = [event for event in self.events if event != "[DONE]" and "choices" in event]
        return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])

    @property
    def error(self) -> dict[str, Any]:
        """Of a status or of the last event but one; {} for none."""
        last = self.body if self.body is not None else self.events[-2]
        return dict(last.get("error", {}))

    @property
    def whole(self) -> bool:
        return self.status == 200 and not self.error and (self.body is not None or self.events[-1] == "[DONE]")


def connect(server: HttpServer) -> HTTPConnection:
    return HTTPConnection(urlsplit(server.url).netloc, timeout=LIMIT)


class Client(threading.Thread):
    """Sends one request; `begun` is set once the first event is there, `answer` once all is."""

    def __init__(self, server: HttpServer, body: Any, headers: dict[str, str] | None = None) -> None:
        super().__init__(daemon=True)
        self.begun = threading.Event()
        self._answer: Answer | None = None
        self._server, self._body, self._headers = server, body, headers or {}
        self.start()

    def run(self) -> None:
        connection = connect(self._server)
        try:
            connection.request("POST", COMPLETIONS, json.dumps(self._body), {**JSON, **self._headers})
            with connection.getresponse() as response:
                self._answer = self._read(response)
        finally:
            connection.close()

    def _read(self, response: HTTPResponse) -> Answer:
        answer = Answer(response.status, {name.lower(): value for name, value in response.getheaders()})
        if not answer.headers["content-type"].startswith("text/event-stream"):
            answer.body = json.loads(response.read())
            return answer
        for event in events(response):
            answer.events.append(event)
            self.begun.set()
        return answer

    @property
    def answer(self) -> Answer:
        self.join(LIMIT)
        assert self._answer is not None, "the client got no answer"
        return self._answer


def events(response: HTTPResponse) -> Iterator[Any]:
    for line in response:
        if line.startswith(b"data: "):
            data = line.removeprefix(b"data: ").strip()
            yield "[DONE]" if data == b"[DONE]" else json.loads(data)


def ask(server: HttpServer, body: Any, **headers: str) -> Answer:
    return Client(server, body, headers).answer


def texts(server: HttpServer, bodies: list[dict[str, Any]]) -> list[str]:
    """One after the other."""
    return [ask(server, body).text for body in bodies]


# -- bare sockets


def dial(server: HttpServer, receive_buffer: int | None = None) -> socket.socket:
    parts = urlsplit(server.url)
    bare = socket.socket()
    if receive_buffer is not None:
        bare.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    bare.settimeout(LIMIT)
    bare.connect((parts.hostname, parts.port))
    return bare


def head(method: str = "POST", path: str = COMPLETIONS, **headers: Any) -> bytes:
    """A request's; `content_length=3` is a header."""
    lines = [f"{method} {path} HTTP/1.1", "host: here", "content-type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def message(body: Any, **headers: Any) -> bytes:
    """A whole request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head(content_length=len(data), **headers) + data


def answer(bare: socket.socket) -> Answer:
    """The next one."""
    with HTTPResponse(bare) as response:
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, headers, body=json.loads(response.read() or b"null"))


def reset(bare: socket.socket) -> None:
    """Close with an RST."""
    bare.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    bare.close()


# -- a server


#: Each look takes a server up to 10 ms.
eventually = partial(support.eventually, pause=0.05)


def settle(server: HttpServer, limit: float = 20.0) -> None:
    """Until nothing of any request is left."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    eventually(lambda: not server.metric(*names, "pilotfish_requests_in_flight"), limit)


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def nothing_left(directory: Path, pids: list[int]) -> bool:
    """Of a server and its workers, whose temporary files were there."""
    return not any(map(alive, pids)) and not list(directory.glob("pilotfish-*"))
