"""Whatever bytes a client may send: the right status, one line that says why, and nobody else is harmed."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from http.client import HTTPResponse
from time import monotonic, sleep
from typing import Any

import pytest
from http_clients import Answer, Client, answer, ask, completion, dial, head, message
from live import HttpServer
from mutants import resident_bytes
from sizes import sized

LIVELY = completion(3, max_tokens=sized(30, 120), stream=True)
MIB = 1 << 20


@pytest.fixture(scope="module")
def expected(server: HttpServer) -> str:
    return ask(server, LIVELY).text


@pytest.fixture(autouse=True)
def _bystander(server: HttpServer, expected: str) -> Iterator[None]:
    """Another client, whose stream runs meanwhile."""
    client = Client(server, LIVELY)
    yield
    assert client.answer.whole and client.answer.text == expected


def post(server: HttpServer, body: Any, **headers: Any) -> Answer:
    with dial(server) as client:
        client.sendall(message(body, **headers))
        return answer(client)


def one_line(found: Answer, status: int, about: str, case: object = "") -> None:
    assert found.status == status, (case, found)
    assert found.error["message"].isprintable() and about in found.error["message"], (case, found.error)
    assert set(found.error) == {"message", "type", "param", "code"} and len(found.error["message"]) < 600, case


# -- bodies


def test_what_is_odd_but_lawful(server: HttpServer) -> None:
    plain = completion(max_tokens=4, temperature=0.0)
    text = post(server, plain).text
    twice = json.dumps(plain).encode()[:-1] + b', "max_tokens": 4}'
    zero = json.dumps(plain).encode().replace(b'"temperature": 0.0', b'"temperature": -0')
    for body in (twice, zero, {**plain, "stop": None, "n": None, "model": None, "logit_bias": None, "user": None}):
        assert post(server, body).text == text


# -- sizes


def test_a_large_body_is_refused_before_it_is_there(server: HttpServer) -> None:
    with dial(server) as client:
        client.sendall(head(content_length=10 * MIB) + b'{"prompt": "')
        one_line(answer(client), 413, "body")
    with dial(server) as client:
        client.sendall(head(content_length="9" * 30))
        assert answer(client).status in (400, 413)


CHUNKED = [head(transfer_encoding="chunked"), *[b"100000\r\n" + bytes(MIB) + b"\r\n"] * 10, b"0\r\n\r\n"]
WHOLE = [head(content_length=10 * MIB), *[bytes(MIB)] * 10]


@pytest.mark.parametrize("parts", [CHUNKED, WHOLE], ids=["chunked", "whole"])
def test_a_large_body_is_refused_for_a_client_that_sends_it_all(parts: list[bytes], server: HttpServer) -> None:
    before = resident_bytes()
    with dial(server) as client:
        for part in parts:
            client.sendall(part)
        one_line(answer(client), 413, "body")
        client.sendall(head("GET", "/health"))  # the connection goes on
        assert answer(client).status == 200
    assert resident_bytes() - before < 64 * MIB


HEADS = {
    "a long line": [b"x: " + b"a" * MIB + b"\r\n"],
    "a line without an end": [b"x: ", *[b"a" * MIB] * 8],
    "a name without an end": [b"a" * MIB] * 8,
    "many lines": [b"name: some value\r\n"] * 5000,
    "a long path": [b"x: y\r\n"],
}


@pytest.mark.parametrize("name", HEADS)
def test_a_large_head(name: str, server: HttpServer) -> None:
    before, path = resident_bytes(), "/" + "p" * (MIB if name == "a long path" else 1)
    with dial(server) as client:
        with suppress(ConnectionError):  # it is answered, and the rest of it not awaited
            client.sendall(f"GET {path} HTTP/1.1\r\n".encode())
            for part in HEADS[name]:
                client.sendall(part)
            client.sendall(b"\r\n")
        with suppress(ConnectionError):  # an answer to somebody who still sends may be lost
            one_line(answer(client), 431, "headers")
        with suppress(ConnectionError):
            assert client.recv(1) == b""
    assert resident_bytes() - before < 32 * MIB


def test_trailers_are_part_of_the_head(server: HttpServer) -> None:
    with dial(server) as client:
        client.sendall(head(path="/health", transfer_encoding="chunked") + b"1\r\nx\r\n0\r\n")
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                client.sendall(b"x: " + b"a" * 10_000 + b"\r\n")
                sleep(0.001)


def test_many_small_headers_are_lawful(server: HttpServer) -> None:
    with dial(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 5000 + b"\r\n")
        assert answer(client).status == 200


# -- time


STARTED = {
    "nothing": b"",
    "head": b"GET /",
    "body": head(content_length=1000),
    "chunk": head(transfer_encoding="chunked") + b"fff\r\n",
}


def test_clients_that_dribble_are_sent_away(server: HttpServer) -> None:
    """`read_timeout` is 2 s. They come together, as it takes so long."""
    with ThreadPoolExecutor(len(STARTED)) as pool:
        for _ in pool.map(partial(_dribble, server), STARTED):
            pass


def _dribble(server: HttpServer, part: str) -> None:
    with dial(server) as client:
        client.sendall(STARTED[part])
        began = monotonic()
        client.settimeout(0.1)
        while part != "nothing" and not _readable(client):
            client.sendall(b"p")
        client.settimeout(20)
        one_line(answer(client), 408, "headers" if part in ("nothing", "head") else "body")
        assert monotonic() - began > 1.5
        with suppress(ConnectionError):
            assert client.recv(1) == b""


def _readable(client: Any) -> bool:
    try:
        return bool(client.recv(1, 2))  # MSG_PEEK
    except TimeoutError:
        return False


def test_a_connection_between_requests_is_sent_away_too(server: HttpServer) -> None:
    with dial(server) as client:
        client.sendall(head("GET", "/health"))
        assert answer(client).status == 200
        client.settimeout(0.1)
        while not _readable(client):  # no request begins with these
            client.sendall(b"\r\n")
        client.settimeout(20)
        one_line(answer(client), 408, "headers")


def test_a_body_that_is_cut_off_leaves_nothing(server: HttpServer) -> None:
    with dial(server) as client:
        client.sendall(head(content_length=1000) + b'{"prompt": "x"')
    assert ask(server, completion(max_tokens=4)).status == 200


# -- requests


def test_other_methods(server: HttpServer) -> None:
    for method in ("GET", "HEAD", "PUT", "OPTIONS", "DELETE", "PATCH", "TRACE", "CONNECT", "PROPFIND"):
        with dial(server) as client:
            client.sendall(head(method))
            with HTTPResponse(client, method=method) as response:
                response.begin()
                assert (response.status, response.getheader("allow")) == (405, "POST"), method
                body = response.read()
        if method != "HEAD":
            one_line(Answer(405, {}, body=json.loads(body)), 405, "is not allowed; expected POST", method)


PATHS = [
    *("/nothing", "//v1/completions", "/v1/completions/", "/v1/models/%00", "/playground/../main.py"),
    *("/playground/%2e%2e/main.py", "/playground/..%2f..%2fconfig.py", "/playground/....//main.py"),
    *("/playground//etc/passwd", "/playground/%5c..%5cmain.py", "/playground/", "/" + "%ff" * 100),
]


def test_other_paths(server: HttpServer) -> None:
    for path in PATHS:
        with dial(server) as client:
            client.sendall(head("GET", path))
            one_line(answer(client), 404, "", path)


NO_HTTP = [b"hello\r\n\r\n", bytes(100), b"\x16\x03\x01\x02", b"BREW / HTTP/1.1\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"]


def test_what_is_no_http(server: HttpServer) -> None:
    for data in NO_HTTP:
        with dial(server) as client:
            client.sendall(data)
            one_line(answer(client), 400, "HTTP/1.1", data)
            assert client.recv(1) == b""


def test_what_is_no_http_after_a_request(server: HttpServer) -> None:
    """Its answer is not mixed with another one."""
    with dial(server) as client:
        client.sendall(message(completion(max_tokens=1500, stream=True)))
        data = client.recv(1 << 16)
        client.sendall(b"hello\r\n\r\n")
        with suppress(ConnectionError):
            while part := client.recv(1 << 16):
                data += part
    assert data.count(b"HTTP/1.1 ") == 1 and b"[DONE]" not in data
