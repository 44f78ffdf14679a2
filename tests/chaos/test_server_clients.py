"""Clients of a server that go away, or read slowly or not at all."""

import json
import socket
from collections.abc import Callable
from time import sleep

import pytest
from http_clients import LIMIT, Client, answer, ask, completion, dial, eventually, message, reset, settle
from live import HttpServer
from mutants import resident_bytes
from sizes import sized

#: Far more bytes than the sockets of both ends hold, and the server before it waits.
BULKY = completion(max_tokens=1500, n=4, logprobs=20, stream=True)


@pytest.mark.parametrize("leave", [socket.socket.close, reset])
@pytest.mark.parametrize("stream", [True, False])
def test_a_gone_client_holds_nothing(stream: bool, leave: Callable[[socket.socket], None], server: HttpServer) -> None:
    settle(server)
    for first in sized((0, 5), (0, 5, 10)):
        waiting = [dial(server) for _ in range(5)]
        ended = server.metric("pilotfish_requests_total") if first else 0.0
        for i, client in enumerate(waiting):
            client.sendall(message(completion(first + i, max_tokens=1500, stream=stream)))
        eventually(lambda: server.metric("vllm:num_requests_running") == 4)
        if stream:
            assert waiting[0].recv(1 << 16).startswith(b"HTTP/1.1 200")
        for client in waiting:
            leave(client)
        settle(server, 5)
        assert server.metric("pilotfish_requests_total") >= ended + 5


def test_of_requests_sent_at_once_all_end_with_their_client(server: HttpServer) -> None:
    client = dial(server)
    client.sendall(message(completion(max_tokens=1500, stream=True)) * 3)
    assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
    reset(client)
    settle(server, 5)


def test_requests_sent_at_once_are_answered_in_order(server: HttpServer) -> None:
    bodies = [completion(i, max_tokens=8) for i in range(3)]
    with dial(server) as client:
        client.sendall(b"".join(map(message, bodies)))
        found = [answer(client).text for _ in bodies]
    assert found == [ask(server, body).text for body in bodies]


def test_a_slow_reader_gets_all_and_keeps_nobody_waiting(server: HttpServer) -> None:
    slow = completion(1, max_tokens=sized(500, 1000), stream=True)
    expected, other = ask(server, slow).text, ask(server, completion(2)).text
    with dial(server, receive_buffer=2048) as client:
        client.sendall(message(slow))
        data = b""
        for _ in range(12):
            data += client.recv(2048)
            sleep(0.1)  # longer than `write_timeout` in all
            assert ask(server, completion(2)).text == other
        while b"[DONE]" not in data:
            data += client.recv(1 << 16)
    settle(server)
    chunks = [json.loads(line[6:]) for line in data.split(b"\r\n") if line.startswith(b'data: {"id"')]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected


def test_a_reader_that_takes_nothing_is_sent_away(server: HttpServer) -> None:
    """Its answer is held neither in memory nor in slots."""
    expected = ask(server, completion(2)).text
    before = resident_bytes()
    with dial(server, receive_buffer=2048) as client:
        client.sendall(message(BULKY))
        eventually(lambda: server.metric("vllm:num_requests_running") == 4)
        other = Client(server, completion(2))
        settle(server, LIMIT)
        assert resident_bytes() - before < 64 << 20
        data = b"".join(iter(lambda: client.recv(1 << 20), b""))
        assert data.startswith(b"HTTP/1.1 200") and b"[DONE]" not in data
    assert other.answer.text == expected
