"""The client of `bench serve`, and the processes that scripts start."""

from __future__ import annotations

import os
import subprocess
import sys

from programs import children, memory_bytes

from pilotfish.cli.bench.report import MEBIBYTE
from pilotfish.cli.bench.serving.client import Answer, Event
from pilotfish.cli.bench.serving.reading import usage_of

# -- the client


def answer_of(*data: bytes) -> Answer:
    return Answer(((float(i), part) for i, part in enumerate(data)), sent=-1.0, closed=9.0)


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n\r\n"


def test_events_are_read_wherever_the_socket_cuts_them() -> None:
    answer = answer_of(STREAM + b'data: {"a"', b": 1}\n", b'\ndata: {"b": 2}\n\n', b"data: [DONE]\n\n")
    assert [(event.at, event.data) for event in answer.events] == [(2.0, {"a": 1}), (2.0, {"b": 2})]
    assert answer.status == 200 and answer.sent == -1.0 and not usage_of(answer)


def test_a_stream_ends_by_its_last_event() -> None:
    chunked = STREAM.replace(b"Connection: close", b"Transfer-Encoding: chunked")
    body = b'data: {"usage": {"completion_tokens": 7}}\n\n'
    chunk = b"%x\r\n%b\r\n" % (len(body), body)
    done = b"e\r\ndata: [DONE]\n\n\r\n"
    assert answer_of(chunked + chunk + done + b"0\r\n\r\n").ended
    assert not answer_of(chunked + chunk + b"0\r\n\r\n").ended
    cut = answer_of(chunked + chunk)
    assert not cut.ended and usage_of(cut) == {"completion_tokens": 7}


def test_a_body_is_one_event() -> None:
    head = b"HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    answer = answer_of(head, b'{"a": ', b"12}"[:3])
    assert (answer.status, answer.ended, answer.events) == (404, True, [Event(2.0, {"a": 12})])
    assert not answer_of(head, b'{"a"').ended
    assert answer_of().status == 0


# -- the server's process


def test_what_a_process_takes() -> None:
    assert memory_bytes(os.getpid()) > MEBIBYTE
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert child.pid in children(os.getpid())
    finally:
        child.communicate()
    assert memory_bytes(child.pid) == 0
