"""The benches of the server, on a tiny model behind a real one; no test says how fast."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import write_tokenizer
from transformers import AutoTokenizer
from typer.testing import CliRunner

from pilotfish.bench import app, start
from pilotfish.bench.exchange import Answer, Event, Part, Unread, post, read
from pilotfish.bench.http import HttpReport, Served, delays_of, percentile, print_http, speed_of
from pilotfish.bench.live import LiveServer, arguments, children, cpu_seconds, memory_bytes, sums
from pilotfish.bench.load import HELD, MEBIBYTE, Known, LoadReport, Tally, memory_of, print_load, quantiles, settled
from pilotfish.bench.machine import Machine
from pilotfish.bench.mix import KINDS, Asked, Output, agrees, joined, mixed, outputs
from pilotfish.bench.offline import Outcome
from pilotfish.bench.standstill import Standstill, StandstillReport, print_standstill
from pilotfish.bench.start import print_start, run_start
from pilotfish.bench.workload import Prompt
from pilotfish.config import EngineConfig
from pilotfish.errors import EngineError, ParameterError

MACHINE = Machine("none", 1, 1, "0", "0", 1.0, 1.0)


def invoke(command: str, llama: Path, draft: Path, prompt_file: Path, *options: str) -> dict[str, Any]:
    models = ["--target", str(llama), "--draft", str(draft), "--prompts", str(prompt_file)]
    result = CliRunner().invoke(app, [command, *models, "--threads", "1", "--json", *options])
    assert result.exit_code == 0, result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


# -- the benches


def test_http(llama: Path, draft: Path, prompt_file: Path) -> None:
    sizes = ("--concurrency", "1,3", "--repeats", "2", "--max-tokens", "12", "--batches", "1", "--pace", "target=4ms")
    report = invoke("http", llama, draft, prompt_file, "--kv-slots", "4096", *sizes)
    one, three = report["speeds"]
    assert (one["concurrency"], three["concurrency"]) == (1, 3)
    for speed in (one, three):
        assert speed["equal_outputs"] == 1 and speed["http"]["count"] == speed["ratio"]["count"] == 2
        assert {"api", "target", "client"} <= speed["cpu"].keys()
    assert three["http"]["median"] > one["http"]["median"]
    assert [delay["concurrency"] for delay in report["delays"]] == [1, 3]
    assert all(0 < delay["median"] <= delay["p99"] and delay["events"] >= 2 for delay in report["delays"])
    assert report["holds"] == (min(one["ratio"]["median"], three["ratio"]["median"]) >= 0.97)


def test_load(llama: Path, draft: Path, prompt_file: Path) -> None:
    sizes = ("--requests", "16", "--streams", "6", "--seconds", "1.5", "--max-tokens", "12", "--aborts", "0.5")
    models = ("--kv-slots", "16384", "--mode", "sync")
    report = invoke("load", llama, draft, prompt_file, *models, *sizes)
    assert report["statuses"].keys() == {"200"} and report["unequal"] == report["failed"] == report["refused"] == 0
    assert report["aborted"] > 0 and {"n=2", "long prompt", "logprobs", "whole completion"} <= report["kinds"].keys()
    assert report["memory"].keys() == {"api", "target"} and report["tokens_per_second"] > 0
    assert not any(report["held"].values()) and report["first_token"]["count"] > 0


# -- the client


def unread(*data: bytes) -> Unread:
    return Unread([Part(float(i), part) for i, part in enumerate(data)], sent=-1.0, closed=9.0)


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n\r\n"


def test_events_are_read_wherever_the_socket_cuts_them() -> None:
    answer = read(unread(STREAM + b'data: {"a"', b": 1}\n", b'\ndata: {"b": 2}\n\n', b"data: [DONE]\n\n"))
    assert [(event.at, event.data) for event in answer.events] == [(2.0, {"a": 1}), (2.0, {"b": 2})]
    assert answer.status == 200 and answer.sent == -1.0 and answer.tokens == 0


def test_a_stream_ends_by_its_last_event() -> None:
    chunked = STREAM.replace(b"Connection: close", b"Transfer-Encoding: chunked")
    body = b'data: {"usage": {"completion_tokens": 7}}\n\n'
    chunk = b"%x\r\n%b\r\n" % (len(body), body)
    done = b"e\r\ndata: [DONE]\n\n\r\n"
    assert read(unread(chunked + chunk + done + b"0\r\n\r\n")).ended
    assert not read(unread(chunked + chunk + b"0\r\n\r\n")).ended
    cut = read(unread(chunked + chunk))
    assert not cut.ended and cut.tokens == 7


def test_a_body_is_one_event() -> None:
    head = b"HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    answer = read(unread(head, b'{"a": ', b"12}"[:3]))
    assert (answer.status, answer.ended, answer.events) == (404, True, [Event(2.0, {"a": 12})])
    assert not read(unread(head, b'{"a"')).ended
    assert read(unread()).status == 0


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
        answer = await post(f"http://127.0.0.1:{port}", "/v1/completions", {"prompt": "x"}, cut=200)
        await asyncio.wait_for(gone.wait(), 10)
    assert answer.status == 200 and answer.events and not answer.ended and answer.size >= 200
    assert seen[0].startswith(b"POST /v1/completions HTTP/1.1\r\n") and b"connection: close" in seen[0]


# -- the arithmetic


def answered(*chunks: dict[str, Any], ended: bool = True, status: int = 200) -> Answer:
    return Answer(status, [Event(float(i), chunk) for i, chunk in enumerate(chunks)], ended, 0.0, 9.0, 100)


def text_chunk(text: str, index: int = 0, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": index, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}]}


def test_speeds_are_compared_round_by_round() -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 10}}
    served = [Served(s, [answered(text_chunk("ab"), usage)], {"api": 0.5}) for s in (2.0, 4.0)]
    speed = speed_of("", 1, served, [Outcome(1.0, 10, ["ab"]), Outcome(4.0, 10, ["b"])])
    assert (speed.ratio.minimum, speed.ratio.maximum) == (0.5, 1.0)
    assert speed.equal_outputs == 0.5 and speed.cpu["api"] == pytest.approx(1 / 6)


def test_delays_are_of_events_that_tell_of_steps() -> None:
    told = {"choices": [], "pilotfish": {"steps": [{"verified": 0.1}, {"verified": 0.75}]}}
    assert delays_of([answered(text_chunk("a"), told)]) == [pytest.approx(250.0)]
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0 and percentile([1.0, 2.0], 0.99) == 2.0


def test_outputs_are_joined_by_index() -> None:
    logprobs = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0}], "text_offset": [0]}
    first = {"choices": [{"index": 1, "text": "a", "logprobs": logprobs, "finish_reason": None}]}
    found = outputs(answered(first, text_chunk("x"), text_chunk("b", 1, "length")))
    assert found[1] == Output("ab", ("length", None), [["a", -1.0, {"a": -1.0}, 0]]) and found[0].text == "x"
    delta = {"choices": [{"index": 0, "delta": {"content": "hi"}, "logprobs": {"content": [1]}}]}
    assert outputs(answered(delta))[0] == Output("hi", (None, None), [1])
    message = {"choices": [{"index": 0, "message": {"content": "hi"}, "finish_reason": "stop"}]}
    assert outputs(answered(message))[0] == Output("hi", ("stop", None))


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
    assert steady.flat and steady.mib_per_minute == pytest.approx(0.0, abs=1e-6) and steady.peak_mib == 150
    growing = memory_of([(float(t), (100 + t) * MEBIBYTE) for t in range(61)])
    assert not growing.flat and growing.mib_per_minute == pytest.approx(60.0)
    assert growing.relative == pytest.approx(30 / 145)
    assert memory_of([(0.0, MEBIBYTE)]).flat


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
    plain = mixed(prompts, tokenizer, 512, 24, 8)
    assert {one.kind for one in plain} == {kind for kind in KINDS if "chat" not in kind}
    assert all(len(one.body["prompt"]) == 504 for one in plain if one.kind == "long prompt")
    assert len({one.body["seed"] for one in plain}) == 24 and plain == mixed(prompts, tokenizer, 512, 24, 8)
    tokenizer.chat_template = "{{ messages }}"
    chats = [one for one in mixed(prompts, tokenizer, 512, 12, 8) if "chat" in one.kind]
    assert len(chats) == 4 and all("messages" in one.body and one.path.endswith("chat/completions") for one in chats)
    with pytest.raises(ParameterError, match="prompts"):
        joined([Prompt("a", "")], tokenizer, 4, 0)


# -- the server's process


def test_what_a_server_is_told(config: EngineConfig) -> None:
    told = arguments(config)
    assert f"--target={config.target}" in told and "--mode=sync" in told and "--kv-slots=4096" in told


def test_metrics_are_summed_over_labels() -> None:
    assert sums('# HELP a b\na{x="1"} 2\na{x="2"} 3.5\nb 1e3\n') == {"a": 5.5, "b": 1000.0}


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
        LiveServer(replace(config, target=tmp_path)) as server,
        pytest.raises(EngineError, match="server: exited"),
    ):
        assert server.url


def test_reports_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 10}}
    speed = speed_of("target=20ms", 4, [Served(1.0, [answered(usage)], {"api": 0.5})], [Outcome(1.0, 10, [""])])
    print_http(HttpReport(MACHINE, "t", "off", "float32", 1, 1, 0.0, 8, 1, 1, [speed], [], holds=True))
    assert "target=20ms" in capsys.readouterr().out
    memory = {"api": memory_of([(float(t), 100 * MEBIBYTE) for t in range(4)])}
    counts = (1, {"chat": 3}, {"200": 3}, 0, 1, 0, 1, {"chat": 1}, 12.5, quantiles([1.0]), quantiles([]))
    print_load(
        LoadReport(MACHINE, "t", "off", "float32", 4, 2.0, *counts, memory, dict.fromkeys(HELD, 0.0), holds=False)
    )
    shown = capsys.readouterr().out
    assert "1 {'chat': 1}" in shown and "12.5" in shown and "0.00%" in shown


# -- a target that stands still, starts


def test_standstill(llama: Path, draft: Path, prompt_file: Path) -> None:
    report = invoke("standstill", llama, draft, prompt_file, "--streams", "3", "--stops", "1", "--max-tokens", "600")
    (stop,) = report["stops"]
    assert (stop["streams"], stop["unequal"], stop["broken"], stop["restarts"]) == (3, 0, 0, 0)


def test_what_changes_below_the_limit_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, killed = (
        Standstill(1.0, 16, 0, 0, None, 0),
        Standstill(5.0, 16, 0, 1, 2.1, 0),
        Standstill(40.0, 16, 16, 16, 2.1, 1),
    )
    assert StandstillReport("t", "off", "float32", 30.0, [good, killed]).holds
    report = StandstillReport("t", "off", "float32", 30.0, [good, bad])
    assert not report.holds
    print_standstill(report)
    out = capsys.readouterr().out
    assert "never" in out and "2.1 s" in out


def test_starts_are_counted_by_role(llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    class Server:
        def __init__(self, _: object) -> None:
            self.url = "http://127.0.0.1:1"

        def processes(self) -> dict[str, int]:
            return {"api": os.getpid(), "target": os.getpid()}

        def __enter__(self) -> Server:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing runs."""

    monkeypatch.setattr(start, "LiveServer", Server)
    done: list[str] = []
    report = run_start(EngineConfig(target=llama), 3, done.append)
    assert len(report.seconds) == len(done) == 3 and report.resident_mib.keys() == {"api", "target"}
    assert all(size > 10 for size in report.resident_mib.values())
    print_start(report)
    assert "target, MiB" in capsys.readouterr().out
