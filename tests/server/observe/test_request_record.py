"""A request's record from the deltas that a server gets."""

from typing import Any

import pytest
from server_traffic import value

from pilotfish.core.scheduling.request import FinishReason
from pilotfish.server.observe.metrics import ServerMetrics
from pilotfish.server.observe.request_records import RequestFacts, RequestRecord
from pilotfish.wire.serving import Delta, Finish, Verified


@pytest.fixture
def metrics() -> ServerMetrics:
    return ServerMetrics("a model")


def facts(n: int = 1) -> RequestFacts:
    return RequestFacts(prompts=(7,), n=n, max_tokens=32, mode="sync", streaming=True)


def delta(
    *verified: tuple[float, int, int, int], index: int = 0, queued: float | None = None, reason: str | None = None
) -> Delta:
    parts = [Verified(*part) for part in verified]
    tokens = [0] * sum(part.tokens for part in parts)
    finish = None if reason is None else Finish(FinishReason(reason), None)
    return Delta("r", index, tokens, "", [0] * len(tokens), parts, queued=queued, finish=finish)


def gaps(metrics: ServerMetrics) -> list[float]:
    """How many there were between steps of one output, and their sum in seconds."""
    return [value(metrics, f"vllm:inter_token_latency_seconds_{what}") for what in ("count", "sum")]


def test_outputs_have_gaps_of_their_own(metrics: ServerMetrics) -> None:
    record = RequestRecord(metrics, facts(n=2), arrived=0.0)
    record.update(0, delta((1.0, 1, 0, 0), index=0, queued=0.0), now=1.0)
    record.update(1, delta((3.0, 1, 0, 0), index=1, queued=2.0), now=3.0)
    record.update(0, delta((4.0, 2, 3, 1), index=0, reason="length"), now=4.0)
    record.update(1, delta((4.5, 1, 3, 0), index=1, reason="stop"), now=4.5)
    record.finish(now=4.5)
    assert gaps(metrics) == [2, 3.0 + 1.5]
    assert (record.generation_tokens, record.longest, record.queued) == (5, 3, 0.0)
    assert record.time_per_output_token == 1.75


def test_clocks_of_two_targets_are_not_compared(metrics: ServerMetrics) -> None:
    record = RequestRecord(metrics, facts(), arrived=0.0)
    resumed = Delta("r", 0, [0, 0], "", [0, 0], [Verified(0.25, 1, 0, 0, resumed=True), Verified(0.75, 1, 0, 0)])
    for told in (delta((900.0, 1, 0, 0)), delta((900.5, 1, 0, 0)), resumed):
        record.update(0, told, now=1.0)
    assert gaps(metrics) == [2, 1.0]


def test_steps_without_tokens_leave_no_gap(metrics: ServerMetrics) -> None:
    record = RequestRecord(metrics, facts(), arrived=0.0)
    record.update(0, delta((1.0, 0, 0, 0), queued=0.0), now=1.0)
    record.finish(now=2.0)
    assert gaps(metrics) == [0, 0] and value(metrics, "vllm:prefix_cache_queries_total") == 7
    assert record.first_token is record.last_token is record.time_to_first_token is record.decode is None
    assert record.prefill is record.inference is record.time_per_output_token is None


@pytest.mark.parametrize(
    ("reasons", "given", "expected"),
    [
        *((["stop", "stop"], None, "stop"), (["stop", "length"], None, "length")),
        *((["abort", "length"], None, "abort"), ([], None, "abort"), (["stop", "stop"], "error", "error")),
        ([], "error", "error"),
    ],
)
def test_the_worst_reason_of_all_outputs(metrics: ServerMetrics, reasons: list[str], given: Any, expected: str) -> None:
    record = RequestRecord(metrics, facts(n=2), arrived=0.0)
    for index, reason in enumerate(reasons):
        record.update(index, delta((1.0, 1, 0, 0), index=index, reason=reason), now=1.0)
    record.finish(now=2.0, reason=given)
    assert record.reason == expected
