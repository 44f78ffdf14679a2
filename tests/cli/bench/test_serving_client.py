"""`bench serve` against odd servers: framings, turns, failures; and what it makes of answers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_server import GOOD, HEAD, ScriptedServer, chunk, chunked, plain, sse, usage
from typer.testing import CliRunner

from pilotfish.cli.bench.commands import app
from pilotfish.cli.bench.report import ProgressBar, Report
from pilotfish.cli.bench.serving.acceptance import Accepted, accepted_of, counted, total_accepted
from pilotfish.cli.bench.serving.client import Answer
from pilotfish.cli.bench.serving.command import run_serve
from pilotfish.cli.bench.serving.figures import goodput, latency_rows, spread_of, throughput_row
from pilotfish.cli.bench.serving.options import ServeBenchOptions
from pilotfish.cli.bench.serving.reading import error_of, token_times, usage_of
from pilotfish.cli.bench.serving.records import SentRequest
from pilotfish.engine.pairs import resolve_pair
from pilotfish.errors import EngineError, InputError, ParameterError


def serve(url: str, **given: Any) -> Report:
    small = {"requests": 3, "warmup": 0, "prompt_tokens": 5, "answer_tokens": 8, "timeout": 20.0}
    return run_serve(ServeBenchOptions(**{"base_url": url, **small, **given}), ProgressBar())


def rows_of(report: Report) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = report.results["requests"]
    return found


# -- framings

NAMED, CLOSING = b"event: chunk\nid: 1\ndata: ", HEAD + b"connection: close\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "closes"),
    [
        pytest.param(chunked(GOOD), True, id="chunked"),
        pytest.param(chunked(GOOD), False, id="stays open"),
        pytest.param(chunked(GOOD, size=1), True, id="byte by byte"),
        pytest.param(chunked(GOOD.replace(b"data: ", b"data:")), True, id="no space"),
        pytest.param(chunked(GOOD.replace(b"\n", b"\r\n")), True, id="CR LF"),
        pytest.param(chunked(b": a comment\n\n" + GOOD.replace(b"data: ", NAMED)), True, id="comments, names"),
        pytest.param(CLOSING + GOOD, True, id="until it closes"),
        pytest.param(CLOSING + GOOD.removesuffix(b"data: [DONE]\n\n"), True, id="without DONE"),
    ],
)
def test_framings_of_servers(answer: bytes, closes: bool) -> None:
    with ScriptedServer(lambda *_: answer, closes=closes) as server:
        report = serve(server.url)
    assert [(row["tokens"], row["error"], row["finish_reason"]) for row in rows_of(report)] == [(3, "", "stop")] * 3
    assert all(len(row["times"]) == 3 and row["prompt_tokens"] == 5 for row in rows_of(report))
    assert report.results["settings"][0]["requests"] == 3 and not report.error and not report.results["partial"]
    assert report.results["tokens_counted_by"] == ["usage"]


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
    with ScriptedServer(lambda *_: chunked(sse(*told, chunk(finish="stop"), last), 4096), got=models) as server:
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
    answers = [one["content"] for one in server.bodies[2]["messages"] if one["role"] == "assistant"]
    assert answers == ["answer 0", "answer 1"]
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
    told = ["HTTP 429: slow\ndown", "it broke", "the answer broke off", "it is no JSON object: <html>"]
    assert errors[1:] == [*told, "HTTP 422: {'detail': 'eos'}"]
    assert all(row["times"] == [] and row["first"] is None for row in rows_of(report)[1:])
    assert not report.results["partial"] and not report.error


def test_an_endpoint_that_breaks_off(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    with ScriptedServer(lambda number, _: chunked(GOOD) if number < 2 else None) as server:
        asked = ["serve", f"--base-url={server.url}", "--requests=9", "--warmup=0", "--prompt-tokens=5"]
        result = CliRunner().invoke(app, [*asked, f"--out={out}"])
    assert isinstance(result.exception, EngineError)
    said = str(result.exception)
    assert said.startswith(f"endpoint: {server.url} broke off after 3 of 9 requests: ") and "\n" not in said
    kept = json.loads(out.read_text())
    assert kept["partial"] and kept["settings"][0]["requests"] == 2 and kept["settings"][0]["failed"] == 1
    assert [bool(row["error"]) for row in kept["requests"]] == [False, False, True]


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
    with ScriptedServer(lambda *_: chunked(GOOD), got=models) as server:
        with pytest.raises(EngineError, match=said):
            serve(server.url)
        assert serve(server.url, model="m", requests=1).results["model"] == "m"


def test_a_trace_that_is_too_short(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}\n')
    with pytest.raises(InputError, match="too few lines for 2 loads"):
        serve("http://127.0.0.1:9", trace=path, rates="1,2")


# -- what is made of answers: when tokens came, latencies, throughput, goodput, speculation


def answer_of(*events: dict[str, Any], **line: bytes) -> Answer:
    """An event a second."""
    parts = [sse(event, done=False, **line) for event in events]
    return Answer(((float(i), data) for i, data in enumerate([HEAD + b"\r\n", *parts])), 0.0, 99.0)


def record(
    times: Sequence[float] = (1.0, 2.0), sent: float = 0.0, ended: float | None = None, **given: Any
) -> SentRequest:
    fields = {"id": "r", "category": "chat", "session": "s", "turn": 0, "due": sent, "prompt_tokens": 7}
    fields |= {"cached_tokens": None, "counted_by": "usage", "finish_reason": "stop", "tokens": len(times)}
    first = times[0] if times else None
    last = ended if ended is not None else times[-1]
    return SentRequest(**{**fields, "sent": sent, "first": first, "ended": last, "times": list(times), **given})


def test_tokens_come_when_events_say() -> None:
    events = [chunk(), chunk("ab"), chunk("cdef"), chunk(finish="stop"), usage(3)]
    assert token_times(answer_of(*events), 3) == [2.0, 3.0, 3.0]  # a third of the text came first
    assert token_times(answer_of(*events), 2) == [2.0, 3.0]  # as many as events
    assert token_times(answer_of(*events), 0) == [] and token_times(answer_of(usage(1)), 1) == []
    running = [{**chunk("x"), "usage": {"completion_tokens": n}} for n in (2, 2, 5)]
    assert token_times(answer_of(*running), 5) == [1.0, 1.0, 3.0, 3.0, 3.0]
    closing = {**chunk(finish="length"), "usage": {"completion_tokens": 2}}  # as transformers' server has it
    assert token_times(answer_of(chunk("a"), chunk("b"), closing), 2) == [1.0, 2.0]
    assert usage_of(answer_of(*events))["prompt_tokens"] == 5 and usage_of(answer_of(chunk())) == {}


def test_how_answers_end() -> None:
    assert not error_of(answer_of(chunk("a", finish="length")))
    assert error_of(answer_of(chunk("a"))) == "the answer broke off"
    assert error_of(Answer((), 0.0, 1.0)) == "no answer came"
    assert error_of(answer_of({"error": "gone"})) == "gone"


def test_percentiles_are_numpys() -> None:
    draw = np.random.default_rng(1)
    values = draw.exponential(size=101)
    found = spread_of([*values.tolist(), None])
    for share in (50, 90, 95, 99):
        assert found[f"p{share}"] == pytest.approx(1000 * np.percentile(values, share))
    assert found["count"] == 101 and found["mean"] == pytest.approx(1000 * values.mean())
    assert spread_of([None]) == {"count": 0}


def test_figures_of_a_request() -> None:
    one = record([1.5, 2.0, 2.0, 4.5], sent=1.0, ended=5.0)
    assert (one.ttft, one.tpot, one.e2e, one.gaps) == (0.5, 1.0, 4.0, [0.5, 2.5])
    assert record([1.5]).tpot is None and record([], ended=1.0).ttft is None
    rows = {row["ms"]: row for row in latency_rows([one, record([], ended=1.0, error="x")])}
    assert rows["TTFT"]["p50"] == 500 and rows["TPOT"]["max"] == 1000 and rows["ITL"]["count"] == 2
    assert rows["E2E"]["count"] == 1


def options(**given: Any) -> ServeBenchOptions:
    return ServeBenchOptions(base_url="http://a", **given)


def test_throughput_is_of_whole_answers_over_the_time_of_all() -> None:
    records = [record([1.0, 2.0]), record([2.0, 3.0, 4.0], sent=1.0), record([], sent=0.5, ended=9.0, error="x")]
    row = throughput_row(records, options(devices=2))
    assert (row["requests"], row["failed"], row["tokens"], row["seconds"]) == (2, 1, 5, 4.0)
    assert (row["tokens_per_second"], row["tokens_per_second_per_device"]) == (1.25, 0.625)
    assert (row["requests_per_second"], row["at_a_time"], row["tokens_per_second_per_user"]) == (0.5, 1.25, 1.0)
    assert row["prompt_tokens"] == 14 and "goodput_share" not in row
    assert throughput_row([records[2]], options()) == {"requests": 0, "failed": 1}


def test_goodput_counts_those_that_keep_every_limit() -> None:
    records = [record([1.0, 2.0]), record([3.0, 3.5]), record([1.0, 4.0]), record([1.0], error="x"), record([0.5])]
    both = goodput(records, options(ttft_limit_ms=1000.0, tpot_limit_ms=2000.0), seconds=4.0)
    good = [not one.error and one.ttft <= 1 and (one.tpot or 0) <= 2 for one in records if one.ttft is not None]
    assert both == {"goodput_share": np.mean(good), "goodput_requests_per_second": sum(good) / 4}
    assert goodput(records, options(e2e_limit_ms=3500.0), 1.0)["goodput_share"] == 3 / 5
    assert goodput([record([], ended=1.0)], options(ttft_limit_ms=1.0), 1.0)["goodput_share"] == 0
    assert goodput(records, options(), 1.0) == {}


# -- speculation and energy


def test_acceptance_of_vllm_and_of_llama_cpp() -> None:
    told = {"num_spec_steps": 4, "num_draft_tokens": 12, "num_accepted_draft_tokens": 5}
    histogram = {"acceptance_histogram": {"0": 1, "1": 1, "2": 2}}
    ours = accepted_of(answer_of(chunk("a"), {"metrics": {"speculative_decoding": {**told, **histogram}}}))
    assert ours == Accepted(12, 5, 4, {0: 1, 1: 1, 2: 2})
    assert ours.row()["acceptance_length"] == 2.25 and ours.by_depth() == {"offered": [4, 4], "accepted": [3, 2]}
    other = accepted_of(answer_of({"timings": {"draft_n": 10, "draft_n_accepted": 4}}))
    assert other == Accepted(10, 4) and other.row()["acceptance_rate"] == 0.4 and "acceptance_length" not in other.row()
    assert accepted_of(answer_of({"metrics": {"speculative_decoding": None}}, chunk("a"))) is None
    both = total_accepted([ours, ours, None])
    assert both is not None and both.steps == 8 and both.by_length == {0: 2, 1: 2, 2: 4}
    assert total_accepted([ours, other]) == Accepted(22, 9, None, {0: 1, 1: 1, 2: 2}) and total_accepted([None]) is None


@pytest.mark.parametrize("prefix", ["vllm:", "llamacpp:"])
def test_counters_between_two_looks(prefix: str) -> None:
    def text(*values: int) -> str:
        names = ("drafts", "draft_tokens", "accepted_tokens")
        return "".join(
            f'# TYPE {prefix}spec_decode_num_{name} counter\n{prefix}spec_decode_num_{name}_total{{m="{m}"}} {value}\n'
            for name, value in zip(names, values, strict=True)
            for m in "ab"
        )

    assert counted(text(1, 4, 2), text(3, 10, 5)) == Accepted(12, 6, 4)
    assert counted("", text(1, 4, 2)) == Accepted(8, 4, 2)
    assert counted("", "") is None and counted("", "<html>") is None
