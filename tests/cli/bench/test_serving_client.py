"""`bench serve` against odd servers: framings, turns, failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted_server import GOOD, HEAD, ScriptedServer, chunk, chunked, plain, sse, usage
from typer.testing import CliRunner

from pilotfish.cli.bench.commands import app
from pilotfish.cli.bench.report import ProgressBar, Report
from pilotfish.cli.bench.serving.command import run_serve
from pilotfish.cli.bench.serving.options import ServeBenchOptions
from pilotfish.engine.pairs import resolve_pair
from pilotfish.errors import EngineError, InputError, ParameterError


def serve(url: str, **given: Any) -> Report:
    small = {"requests": 3, "warmup": 0, "prompt_tokens": 5, "answer_tokens": 8, "timeout": 20.0}
    return run_serve(ServeBenchOptions(**{"base_url": url, **small, **given}), ProgressBar())


def rows_of(report: Report) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = report.results["requests"]
    return found


# -- framings


@pytest.mark.parametrize(
    "answer",
    [
        chunked(GOOD),
        chunked(GOOD, size=1),
        chunked(GOOD.replace(b"data: ", b"data:")),
        chunked(GOOD.replace(b"\n", b"\r\n")),
        chunked(b": a comment\n\n" + GOOD.replace(b"data: ", b"event: chunk\nid: 1\ndata: ")),
        HEAD + b"connection: close\r\n\r\n" + GOOD,
        HEAD
        + b"connection: close\r\n\r\n"
        + sse(chunk("a b"), chunk(" c"), chunk(finish="stop"), usage(3), done=False),
    ],
    ids=["chunked", "byte by byte", "no space", "CR LF", "comments, names", "until it closes", "without DONE"],
)
def test_framings_of_servers(answer: bytes) -> None:
    with ScriptedServer(lambda *_: answer) as server:
        report = serve(server.url)
    assert [(row["tokens"], row["error"], row["finish_reason"]) for row in rows_of(report)] == [(3, "", "stop")] * 3
    assert all(len(row["times"]) == 3 and row["prompt_tokens"] == 5 for row in rows_of(report))
    assert report.results["settings"][0]["requests"] == 3 and not report.error and not report.results["partial"]
    assert report.results["tokens_counted_by"] == ["usage"]


def test_a_connection_that_stays_open_is_left() -> None:
    with ScriptedServer(lambda *_: chunked(GOOD), closes=False) as server:
        report = serve(server.url)
    assert report.results["settings"][0]["requests"] == 3


def test_whoever_does_not_stream_has_its_tokens_at_the_end() -> None:
    body = {"choices": [{"message": {"content": "abc"}, "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}
    with ScriptedServer(lambda *_: plain("200 OK", body)) as server:
        (row, *_) = rows_of(serve(server.url))
    assert row["error"] == "" and len(row["times"]) == 2 and row["times"][0] == row["times"][1]


def test_without_usage_events_count_or_a_tokenizer() -> None:
    silent = chunked(sse(chunk(), chunk("def add(a, b)"), chunk(": return"), chunk(finish="stop")))
    with ScriptedServer(lambda *_: silent) as server:
        report = serve(server.url)
        told = serve(server.url, tokenizer=str(resolve_pair("pycode").target / "tokenizer.json"))
    assert report.results["tokens_counted_by"] == ["events"] and rows_of(report)[0]["tokens"] == 2
    assert any("each event counts as one token" in note for note in report.results["notes"])
    assert told.results["tokens_counted_by"] == ["tokenizer"] and rows_of(told)[0]["tokens"] > 4
    assert report.results["settings"][0]["prompt_tokens"] is None


def test_what_is_asked() -> None:
    with ScriptedServer(lambda *_: chunked(GOOD)) as server:
        serve(f"{server.url}/v1/", model="x", requests=1, temperature=0.5, ignore_eos=True)
        serve(server.url, endpoint="completions", requests=1, label="here")
    chat, completion = server.bodies
    assert (chat["model"], chat["temperature"], chat["max_tokens"], chat["ignore_eos"]) == ("x", 0.5, 8, True)
    assert chat["stream"] and chat["stream_options"] == {"include_usage": True} and "speculation" not in chat
    assert isinstance(completion["prompt"], str) and completion["model"] == "m" and "messages" not in completion
    posts = [head.split()[1] for head in server.heads if head.startswith(b"POST")]
    assert posts == [b"/v1/chat/completions", b"/v1/completions"]


def test_a_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OWN_KEY", "secret")
    with ScriptedServer(lambda *_: chunked(GOOD)) as server:
        report = serve(server.url, api_key_env="OWN_KEY", requests=1)
    assert all(b"uthorization: Bearer secret" in head for head in server.heads) and "secret" not in report.as_json()
    with pytest.raises(ParameterError, match="an environment variable that holds a key"):
        serve(server.url, api_key_env="NO_KEY")


def test_servers_that_tell_of_each_event_are_asked_to() -> None:
    models = plain("200 OK", {"data": [{"id": "m", "owned_by": "pilotfish"}]})
    told = [{**chunk(text), "usage": {"completion_tokens": n}} for text, n in (("", 0), ("a", 3), ("b", 4))]
    metrics = {"speculative_decoding": {"num_spec_steps": 2, "num_draft_tokens": 6, "num_accepted_draft_tokens": 3}}
    last = {**usage(4), "metrics": metrics}
    with ScriptedServer(lambda *_: chunked(sse(*told, chunk(finish="stop"), last), 4096), models=models) as server:
        report = serve(server.url, requests=2)
    assert server.bodies[0]["stream_options"]["continuous_usage_stats"] and server.bodies[0]["speculation"]
    assert all(len(row["times"]) == 4 for row in rows_of(report))
    assert report.results["speculation"][0]["acceptance_length"] == 2.5


# -- turns


def test_a_turn_has_the_answer_to_the_one_before() -> None:
    def script(number: int, body: dict[str, Any]) -> bytes:
        assert len([one for one in body["messages"] if one["role"] == "assistant"]) == number
        return chunked(sse(chunk(f"answer {number}"), chunk(finish="stop"), usage(2)))

    with ScriptedServer(script) as server:
        report = serve(server.url, workload="sessions", turns=3, requests=3)
    assert [row["error"] for row in rows_of(report)] == [""] * 3
    assert [one["content"] for one in server.bodies[2]["messages"] if one["role"] == "assistant"] == [
        "answer 0",
        "answer 1",
    ]
    sent = [row["sent"] for row in rows_of(report)]
    assert all(later >= row["ended"] for row, later in zip(rows_of(report), sent[1:], strict=False))


def test_nothing_follows_a_turn_that_failed() -> None:
    with ScriptedServer(lambda *_: plain("500 Internal Server Error", {"error": {"message": "no"}})) as server:
        report = serve(server.url, workload="sessions", turns=3, requests=6)
    assert len(server.bodies) == 2
    assert "none of 2 requests succeeded: HTTP 500: no" in report.error


# -- failures


def test_failures_are_counted_and_in_no_average() -> None:
    answers = [chunked(GOOD), plain("429 Too Many Requests", {"error": {"message": "slow\ndown"}})]
    answers += [chunked(sse(chunk("a"), {"error": {"message": "it broke"}}))]
    answers += [chunked(sse(chunk("a"), done=False)), plain("200 OK", b"<html>"), plain("422 No", {"detail": "eos"})]
    with ScriptedServer(lambda number, _: answers[number]) as server:
        report = serve(server.url, requests=6)
    settings = report.results["settings"][0]
    assert (settings["requests"], settings["failed"], settings["tokens"]) == (1, 5, 3)
    assert {row["ms"]: row["count"] for row in report.results["latencies"]}["TTFT"] == 1
    errors = [row["error"] for row in rows_of(report)]
    assert errors[1:] == [
        "HTTP 429: slow\ndown",
        "it broke",
        "the answer broke off",
        "it is no JSON object: <html>",
        "HTTP 422: {'detail': 'eos'}",
    ]
    assert all(row["times"] == [] and row["first"] is None for row in rows_of(report)[1:])
    assert not report.results["partial"] and not report.error


def test_an_endpoint_that_breaks_off(tmp_path: Path) -> None:
    out, page = tmp_path / "out.json", tmp_path / "page.html"
    with ScriptedServer(lambda number, _: chunked(GOOD) if number < 2 else None) as server:
        asked = ["serve", f"--base-url={server.url}", "--requests=9", "--warmup=0", "--prompt-tokens=5"]
        result = CliRunner().invoke(app, [*asked, f"--out={out}", f"--html={page}"])
    assert isinstance(result.exception, EngineError)
    said = str(result.exception)
    assert said.startswith(f"endpoint: {server.url} broke off after 3 of 9 requests: ") and "\n" not in said
    kept = json.loads(out.read_text())
    assert kept["partial"] and kept["settings"][0]["requests"] == 2 and kept["settings"][0]["failed"] == 1
    assert [bool(row["error"]) for row in kept["requests"]] == [False, False, True]
    assert "<svg" in page.read_text()


def test_an_endpoint_that_never_answers() -> None:
    with pytest.raises(EngineError, match=r"^endpoint: http://127\.0\.0\.1:9 cannot be reached: "):
        serve("http://127.0.0.1:9")
    refusing = ScriptedServer(lambda *_: plain("401 Unauthorized", {"error": {"message": "who?"}}))
    with refusing as server, pytest.raises(EngineError, match="no request of the warm-up succeeded: HTTP 401: who"):
        serve(server.url, warmup=2)


def test_a_request_that_does_not_end_has_failed() -> None:
    endless = HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\n:\r\n"
    with ScriptedServer(lambda *_: endless, closes=False) as server:
        report = serve(server.url, requests=1, timeout=0.1)
    assert "no end after 0.1 s" in report.error


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (plain("404 Not Found", {}), "answers HTTP 404; --model names one"),
        (plain("200 OK", {"data": []}), "lists no model"),
        (plain("200 OK", b"<html>"), "is no list of models"),
    ],
)
def test_a_model_must_be_named_where_none_is_listed(models: bytes, said: str) -> None:
    with ScriptedServer(lambda *_: chunked(GOOD), models=models) as server:
        with pytest.raises(EngineError, match=said):
            serve(server.url)
        assert serve(server.url, model="m", requests=1).results["model"] == "m"


@pytest.mark.parametrize("url", ["", "localhost:80", "ftp://a", "http://"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ParameterError, match=r"base_url: .* an http:// or https:// URL"):
        serve(url)


def test_a_trace_that_is_too_short(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n')
    with pytest.raises(InputError, match="too few lines for 2 loads"):
        serve("http://127.0.0.1:9", trace=path, rates="1,2")
