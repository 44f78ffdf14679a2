"""What `bench serve` makes of answers: when tokens came, latencies, throughput, goodput, speculation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scripted_server import HEAD, chunk, sse, usage

from pilotfish.cli.bench.serving.acceptance import Accepted, accepted_of, counted, total_accepted
from pilotfish.cli.bench.serving.client import Answer, Event
from pilotfish.cli.bench.serving.figures import goodput, latency_rows, spread_of, throughput_row
from pilotfish.cli.bench.serving.options import ServeBenchOptions
from pilotfish.cli.bench.serving.reading import finish_of, token_times, usage_of
from pilotfish.cli.bench.serving.records import SentRequest

# -- what comes through the socket


def answer_in(*data: bytes) -> Answer:
    return Answer(((float(i), part) for i, part in enumerate(data)), sent=-1.0, closed=9.0)


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n\r\n"


def test_events_are_read_wherever_the_socket_cuts_them() -> None:
    answer = answer_in(STREAM + b'data: {"a"', b": 1}\n", b'\ndata: {"b": 2}\n\n', b"data: [DONE]\n\n")
    assert [(event.at, event.data) for event in answer.events] == [(2.0, {"a": 1}), (2.0, {"b": 2})]
    assert answer.status == 200 and answer.sent == -1.0 and not usage_of(answer)


def test_a_stream_ends_by_its_last_event() -> None:
    chunked = STREAM.replace(b"Connection: close", b"Transfer-Encoding: chunked")
    body = b'data: {"usage": {"completion_tokens": 7}}\n\n'
    chunk = b"%x\r\n%b\r\n" % (len(body), body)
    done = b"e\r\ndata: [DONE]\n\n\r\n"
    assert answer_in(chunked + chunk + done + b"0\r\n\r\n").ended
    assert not answer_in(chunked + chunk + b"0\r\n\r\n").ended
    cut = answer_in(chunked + chunk)
    assert not cut.ended and usage_of(cut) == {"completion_tokens": 7}


def test_a_body_is_one_event() -> None:
    head = b"HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    answer = answer_in(head, b'{"a": ', b"12}"[:3])
    assert (answer.status, answer.ended, answer.events) == (404, True, [Event(2.0, {"a": 12})])
    assert not answer_in(head, b'{"a"').ended
    assert answer_in().status == 0


# -- arithmetic


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
    assert not finish_of(answer_of(chunk("a", finish="length"))).error
    assert finish_of(answer_of(chunk("a"))).error == "the answer broke off"
    assert finish_of(Answer((), 0.0, 1.0)).error == "no answer came"
    assert finish_of(answer_of({"error": "gone"})).error == "gone"


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
    histogram = {"0": 1, "1": 1, "2": 2}
    ours = accepted_of(
        answer_of(chunk("a"), {"metrics": {"speculative_decoding": {**told, "acceptance_histogram": histogram}}})
    )
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
