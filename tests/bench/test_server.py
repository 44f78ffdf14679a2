"""The benches of the server, on a tiny model behind a real one; no test says how fast."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import server_load
from conftest import Measure
from server_load import (
    HELD,
    KINDS,
    QUEUE,
    Asked,
    Known,
    Load,
    Output,
    Tally,
    agrees,
    ask,
    holds_below,
    joined_prompts,
    memory_of,
    metric_sums,
    mixed,
    outputs,
    quantiles,
    run_load,
    run_standstill,
    settled,
)
from support import make_engine, write_tokenizer
from transformers import AutoTokenizer

from pilotfish.bench import http
from pilotfish.bench.client import Answer, Event
from pilotfish.bench.contestants import Run
from pilotfish.bench.http import (
    asked_of,
    delays_of,
    run_http,
    run_offline,
    run_start,
    served,
    served_speed,
)
from pilotfish.bench.programs import Program, children, cpu_seconds, memory_bytes, server_options, start_server
from pilotfish.bench.report import MEBIBYTE, ProgressBar
from pilotfish.bench.servers import run_servers
from pilotfish.bench.serving.command import run_serve
from pilotfish.bench.serving.options import ServeBenchOptions
from pilotfish.bench.workload import Prompt, jobs_at
from pilotfish.config.engine import EngineConfig
from pilotfish.errors import EngineError, ParameterError

# -- the benches


@pytest.fixture(scope="module")
def server(llama: Path) -> Iterator[Program]:
    """A server for several benches."""
    paced = EngineConfig(target=llama, dtype="float32", threads=1, kv_slots=16384, pace="target=4ms")
    with start_server(paced, QUEUE) as started:
        yield started


@pytest.fixture(autouse=True)
def _one_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (http, server_load):
        monkeypatch.setattr(module, "start_server", lambda *_: nullcontext(request.getfixturevalue("server")))


def test_http(measure: Measure) -> None:
    sizes = {"concurrencies": "1,3", "repeats": 2, "max_tokens": 12, "batches": 1, "paces": "target=4ms"}
    results = measure(run_http, "http", threads=1, kv_slots=4096, **sizes).results
    one, three = results["speeds"]
    assert (one["concurrency"], three["concurrency"]) == (1, 3)
    for speed in (one, three):
        assert speed["equal_outputs"] == 1 and speed["http"].count == speed["ratio"].count == 2
        assert {"api", "target", "client"} <= speed["cpu"].keys()
    assert three["http"].median > one["http"].median
    assert [row["concurrency"] for row in results["delays"]] == [1, 3]
    assert all(0 < row["median"] <= row["p99"] and row["events"] >= 2 for row in results["delays"])
    assert results["holds"] == (min(row["ratio"].median for row in (one, three)) >= 0.97)


def test_ways_to_a_server(server: Program, measure: Measure) -> None:
    url = server.told["url"]
    urls = f"{url},{url.replace('127.0.0.1', 'localhost')}"
    results = measure(run_servers, "servers", urls=urls, concurrencies="2", repeats=2, max_tokens=8, batches=1).results
    first, second = results["servers"]
    assert first["ratio"].median == 1 and second["ratio"].median > 0 and second["equal_outputs"] == 1
    assert results["holds"] == (second["ratio"].median >= 0.96)


def test_a_server_under_requests_in_turns(server: Program) -> None:
    asked = {"base_url": server.told["url"], "endpoint": "completions", "workload": "sessions:1,json:1"}
    sizes = {"requests": 8, "turns": 2, "prompt_tokens": 20, "answer_tokens": 6, "concurrencies": "3", "warmup": 1}
    results = run_serve(ServeBenchOptions(**asked, **sizes), ProgressBar()).results
    assert results["settings"][0]["failed"] == 0 and results["tokens_counted_by"] == ["usage"]
    assert all(len(row["times"]) == row["tokens"] for row in results["requests"])
    later = {row["session"]: row["prompt_tokens"] for row in results["requests"] if row["turn"] == 1}
    assert all(
        row["prompt_tokens"] < later.get(row["session"], 1 << 20) for row in results["requests"] if not row["turn"]
    )


@pytest.mark.parametrize("urls", ["", "http://a", "http://a,http://a", "http://a,b"])
def test_servers_that_cannot_be_compared(measure: Measure, urls: str) -> None:
    with pytest.raises(ParameterError, match="two or more http:// URLs"):
        measure(run_servers, "servers", urls=urls)


def test_an_offline_engine_generates_what_is_asked_of_the_server(llama: Path, prompts: list[Prompt]) -> None:
    jobs = jobs_at(prompts, 0.0, 4)
    with make_engine(llama) as engine:
        run = run_offline(engine, 2, jobs)
    assert run.tokens == 8 and run.seconds > 0 and all(run.texts)
    assert asked_of(jobs[0]) == {"temperature": 0.0, "max_tokens": 4, "seed": jobs[0].params.seed, "ignore_eos": True}


def test_load(config: EngineConfig, prompts: list[Prompt]) -> None:
    """Memory need not be flat in a second, so it may say that it does not hold."""
    results = run_load(config, Load(prompts, requests=12, streams=6, seconds=1.5, max_tokens=12, aborts=0.5))
    assert results["statuses"].keys() == {"200"} and results["unequal"] == results["failed"] == results["refused"] == 0
    assert results["aborted"] > 0 and {"n=2", "long prompt", "logprobs", "whole completion"} <= results["kinds"].keys()
    assert {row["process"] for row in results["memory"]} == {"api", "target"} and results["tokens_per_second"] > 0
    assert not any(results["held"].values()) and results["times_ms"][0]["count"] > 0


def test_standstill(config: EngineConfig, prompts: list[Prompt]) -> None:
    (stop,) = run_standstill(config, prompts, [1.0], streams=3, max_tokens=200)
    assert (stop["streams"], stop["unequal"], stop["broken"], stop["restarts"]) == (3, 0, 0, 0)


def test_changes_below_the_limit_fail() -> None:
    good, bad, killed = (
        {"seconds": seconds, "unequal": changed, "broken": changed, "restarts": 0}
        for seconds, changed in ((1.0, 0), (5.0, 1), (40.0, 16))
    )
    assert holds_below([good, killed], 30.0) and not holds_below([good, bad], 30.0)


def test_starts_are_counted_by_role(measure: Measure) -> None:
    results = measure(run_start, "start", repeats=3, mode="off").results
    assert len(results["seconds"]) == 3 and results["resident_mib"].keys() == {"api", "target"}
    assert all(size > 10 for size in results["resident_mib"].values())


# -- the client


def answer_of(*data: bytes) -> Answer:
    return Answer(((float(i), part) for i, part in enumerate(data)), sent=-1.0, closed=9.0)


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n\r\n"


def test_events_are_read_wherever_the_socket_cuts_them() -> None:
    answer = answer_of(STREAM + b'data: {"a"', b": 1}\n", b'\ndata: {"b": 2}\n\n', b"data: [DONE]\n\n")
    assert [(event.at, event.data) for event in answer.events] == [(2.0, {"a": 1}), (2.0, {"b": 2})]
    assert answer.status == 200 and answer.sent == -1.0 and answer.tokens == 0


def test_a_stream_ends_by_its_last_event() -> None:
    chunked = STREAM.replace(b"Connection: close", b"Transfer-Encoding: chunked")
    body = b'data: {"usage": {"completion_tokens": 7}}\n\n'
    chunk = b"%x\r\n%b\r\n" % (len(body), body)
    done = b"e\r\ndata: [DONE]\n\n\r\n"
    assert answer_of(chunked + chunk + done + b"0\r\n\r\n").ended
    assert not answer_of(chunked + chunk + b"0\r\n\r\n").ended
    cut = answer_of(chunked + chunk)
    assert not cut.ended and cut.tokens == 7


def test_a_body_is_one_event() -> None:
    head = b"HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    answer = answer_of(head, b'{"a": ', b"12}"[:3])
    assert (answer.status, answer.ended, answer.events) == (404, True, [Event(2.0, {"a": 12})])
    assert not answer_of(head, b'{"a"').ended
    assert answer_of().status == 0


def test_a_request_is_broken_off_after_so_many_bytes() -> None:
    asyncio.run(_broken_off())


async def _broken_off() -> None:
    gone = asyncio.Event()
    seen: list[bytes] = []

    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(STREAM)
        while not reader.at_eof() and not writer.is_closing():
            writer.write(b'data: {"a": 1}\n\n')
            await asyncio.sleep(0.01)
        gone.set()
        writer.close()

    server = await asyncio.start_server(endless, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        answer, size = await ask(f"http://127.0.0.1:{port}", "/v1/completions", {"prompt": "x"}, cut=200)
        await asyncio.wait_for(gone.wait(), 10)
    assert answer.status == 200 and answer.events and not answer.ended and size >= 200
    assert seen[0].startswith(b"POST /v1/completions HTTP/1.1\r\n") and b"connection: close" in seen[0]


# -- the arithmetic


def answered(*chunks: dict[str, Any], ended: bool = True, status: int = 200, closed: float = 9.0) -> Answer:
    """A stream of a chunk a second."""
    answer = Answer((), 0.0, closed)
    answer.status, answer.ended = status, ended
    answer.events += [Event(float(i), chunk) for i, chunk in enumerate(chunks)]
    return answer


def text_chunk(text: str, index: int = 0, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": index, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}]}


def test_speeds_are_compared_round_by_round() -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 10}}
    http = [served([answered(text_chunk("ab"), usage, closed=seconds)], {"api": 0.5}) for seconds in (2.0, 4.0)]
    offline = [Run(seconds, [[0] * 10], texts=[text]) for seconds, text in ((1.0, "ab"), (4.0, "b"))]
    speed = served_speed(http, offline)
    assert (speed["ratio"].minimum, speed["ratio"].maximum) == (0.5, 1.0)
    assert speed["equal_outputs"] == 0.5 and speed["cpu"]["api"] == pytest.approx(1 / 6)


def test_delays_are_of_events_that_tell_of_steps() -> None:
    told = {"choices": [], "pilotfish": {"steps": [{"verified": 0.1}, {"verified": 0.75}]}}
    delays = delays_of([answered(text_chunk("a"), told)])
    assert delays == {"events": 1, "median": pytest.approx(250.0), "p99": pytest.approx(250.0)}
    assert quantiles([]) == {"count": 0, "median": 0, "p90": 0, "p99": 0}


def test_outputs_are_joined_by_index() -> None:
    logprobs = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0}], "text_offset": [0]}
    first = {"choices": [{"index": 1, "text": "a", "logprobs": logprobs, "finish_reason": None}]}
    found = outputs(answered(first, text_chunk("x"), text_chunk("b", 1, "length")))
    assert found[1] == Output("ab", ("length", None), [["a", -1.0, {"a": -1.0}, 0]]) and found[0].text == "x"
    delta = {"choices": [{"index": 0, "delta": {"content": "hi"}, "logprobs": {"content": [1]}}]}
    assert outputs(answered(delta))[0] == Output("hi", (None, None), [1])
    message = {"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]}
    assert outputs(answered(message))[0] == Output("hi", ("stop", None))


def test_pieces_of_tool_calls_are_joined_by_index() -> None:
    pieces = [[(0, '{"a"')], [(0, ": 1}"), (1, "{")], [(1, "}")]]
    deltas = [
        {"delta": {"tool_calls": [{"index": i, "function": {"arguments": text}} for i, text in piece]}, "index": 0}
        for piece in pieces
    ]
    found = outputs(answered(*({"choices": [delta]} for delta in deltas)))
    assert found[0].calls == {0: '{"a": 1}', 1: "{}"}
    calls = [{"function": {"arguments": "{}"}}, {"function": {"arguments": "[]"}}]
    message = {"choices": [{"index": 0, "message": {"content": None, "tool_calls": calls}, "finish_reason": "stop"}]}
    assert outputs(answered(message))[0].calls == {0: "{}", 1: "[]"}
    begun = Output(calls={0: '{"a"'})
    assert begun.begins(found[0]) and not Output(calls={0: '{"b"'}).begins(found[0])


@pytest.mark.parametrize(
    ("kind", "whole", "wrong"),
    [
        ("chat json", '{"name": "a", "kind": "class", "sizes": [], "at": "12:30"}', '{"name": "a"}'),
        ("regex", "abc(de, f)", "abc(de, f"),
        ("grammar", "12+3-4", "12+"),
    ],
)
def test_whole_outputs_are_what_was_asked_for(kind: str, whole: str, wrong: str) -> None:
    assert Output(whole, ("stop", None)).valid(kind) and not Output(wrong, ("stop", None)).valid(kind)
    assert Output(wrong, ("length", None)).valid(kind) and Output(wrong).valid(kind)
    assert Output(wrong, ("stop", None)).valid("chat")
    call = Output("", ("tool_calls", None), calls={0: "{}"})
    assert not call.valid("whole chat tool")


def test_a_cut_answer_agrees_with_what_it_begins() -> None:
    expected = {0: Output("abc", ("length", None))}
    assert agrees(answered(text_chunk("abc", finish="length")), expected)
    assert not agrees(answered(text_chunk("ab", finish="length")), expected)
    assert agrees(answered(text_chunk("ab"), ended=False), expected)
    assert agrees(answered(ended=False), expected)
    assert not agrees(answered(text_chunk("b"), ended=False), expected)
    assert not agrees(answered(text_chunk("a", index=1), ended=False), expected)
    assert not agrees(answered(), expected)


def test_a_tally_knows_what_a_client_did() -> None:
    tally = Tally()
    known = Known(Asked("greedy", "/v1/completions", {"stream": True}), {0: Output("ab", ("stop", None))}, 50)
    tally.add(known, answered(text_chunk("a"), text_chunk("b", finish="stop")), cut=False)
    tally.add(known, answered(text_chunk("a"), ended=False), cut=True)
    tally.add(known, answered(text_chunk("a"), ended=False), cut=False)
    tally.add(known, answered(text_chunk("x"), ended=False), cut=True)
    tally.add(known, answered({"error": {}}, status=500), cut=False)
    assert tally.statuses == {"200": 4, "500": 1} and (tally.aborted, tally.failed) == (2, 1)
    assert tally.unequal["greedy"] == 1 and tally.between == [1000.0] and len(tally.first) == 4


def test_memory_is_flat_or_grows() -> None:
    steady = memory_of([(float(t), (100 + (50 if t < 30 else 0)) * MEBIBYTE) for t in range(61)])
    assert steady["flat"] and steady["mib_per_minute"] == pytest.approx(0.0, abs=1e-6) and steady["peak_mib"] == 150
    growing = memory_of([(float(t), (100 + t) * MEBIBYTE) for t in range(61)])
    assert not growing["flat"] and growing["mib_per_minute"] == pytest.approx(60.0)
    assert growing["relative"] == pytest.approx(30 / 145)
    assert memory_of([(0.0, MEBIBYTE)])["flat"]


def test_what_is_held_has_a_while_to_be_given_back() -> None:
    values = iter([3.0, 1.0, 0.0])
    waits: list[float] = []
    assert not any(settled(lambda: dict.fromkeys(HELD, next(values)), waits.append).values()) and len(waits) == 2
    assert all(settled(lambda: dict.fromkeys(HELD, 1.0), waits.append).values())


# -- what is asked


def test_the_mix_has_all_kinds_and_seeds(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    prompts = [Prompt("a", "def add(a, b):\n"), Prompt("b", "import os\n")]
    plain = mixed(prompts, tokenizer, 512, 2 * len(KINDS), 8)
    assert {one.kind for one in plain} == {kind for kind in KINDS if "chat" not in kind}
    assert all(len(one.body["prompt"]) == 504 for one in plain if one.kind == "long prompt")
    again = mixed(prompts, tokenizer, 512, 2 * len(KINDS), 8)
    assert len({one.body["seed"] for one in plain}) == 2 * len(KINDS) and plain == again
    tokenizer.chat_template = "{{ messages }}"
    chats = [one for one in mixed(prompts, tokenizer, 512, 12, 8) if "chat" in one.kind]
    assert len(chats) == 4 and all("messages" in one.body and one.path.endswith("chat/completions") for one in chats)
    with pytest.raises(ParameterError, match="prompts"):
        joined_prompts([Prompt("a", "")], tokenizer, 4, 0)


# -- the server's process


def test_what_a_server_is_told(config: EngineConfig) -> None:
    told = server_options(config)
    assert f"--target={config.target}" in told and "--mode=sync" in told and "--kv-slots=4096" in told


def test_metrics_are_summed_over_labels() -> None:
    assert metric_sums('# HELP a b\na{x="1"} 2\na{x="2"} 3.5\nb 1e3\n') == {"a": 5.5, "b": 1000.0}


def test_what_a_process_takes() -> None:
    assert memory_bytes(os.getpid()) > MEBIBYTE and cpu_seconds(os.getpid()) > 0
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert child.pid in children(os.getpid())
    finally:
        child.communicate()
    assert memory_bytes(child.pid) == cpu_seconds(child.pid) == 0


def test_a_server_that_does_not_start(config: EngineConfig, tmp_path: Path) -> None:
    with (
        start_server(replace(config, target=tmp_path)) as started,
        pytest.raises(EngineError, match="server: exited"),
    ):
        assert started.told
