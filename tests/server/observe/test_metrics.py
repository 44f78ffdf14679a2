"""The metrics of a server: names, labels, sums, and bounds on labels."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse
from server_traffic import (
    HANDED,
    LOST,
    POOL,
    SHADOW,
    delta,
    everything,
    facts,
    prefill_pool,
    progress,
    samples,
    serve_one,
    serving,
    starting,
    status,
    step,
    value,
)

from pilotfish.core.scheduling.request import FinishReason
from pilotfish.engine.targets.replica import ReplicaHealth, RoutedTokens
from pilotfish.errors import ParameterError
from pilotfish.server.observe.fleet_metrics import FleetMetrics
from pilotfish.server.observe.metrics import MAX_TAGS, ServerMetrics
from pilotfish.server.observe.request_records import RequestFacts, RequestRecord, checked_tag
from pilotfish.wire.serving import Delta, ShadowReport

#: What the dashboards and benchmark clients of vLLM look up.
VLLM_SAMPLES = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
    *("num_preemptions_total", "prompt_tokens_total", "generation_tokens_total", "request_success_total"),
    *("prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("external_prefix_cache_queries_total", "external_prefix_cache_hits_total"),
    *("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total"),
    *("spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total"),
    *(
        f"{name}_{suffix}"
        for suffix in ("bucket", "sum", "count")
        for name in (
            *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
            *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds"),
            *("request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens"),
            *("request_generation_tokens", "iteration_tokens_total", "request_max_num_generation_tokens"),
            *("request_params_n", "request_params_max_tokens"),
        )
    ),
}


@pytest.fixture
def metrics() -> ServerMetrics:
    return ServerMetrics("a model")


@pytest.fixture
def fleet(metrics: ServerMetrics) -> FleetMetrics:
    return FleetMetrics(metrics)


def names(metrics: ServerMetrics) -> set[str]:
    return {name for name, _, _ in samples(metrics)}


def assert_values(metrics: ServerMetrics, name: str, label: str, expected: dict[str, float]) -> None:
    assert {each: value(metrics, name, **{label: each}) for each in expected} == expected


def test_both_formats_have_vllms_names_and_labels(metrics: ServerMetrics) -> None:
    everything(metrics)
    told, plain = metrics.render("text/plain;version=0.0.4")
    body, openmetrics = metrics.render("application/openmetrics-text;version=x;q=0.5, text/plain")
    assert plain.startswith("text/plain; version=0.0.4")
    assert openmetrics.startswith("application/openmetrics-text")
    text = body.decode()
    assert text.endswith("# EOF\n")
    for families in (parse_openmetrics(text), parse(told.decode())):
        found = {one.name: one.labels for family in families for one in family.samples if one.name.startswith("vllm:")}
        assert {f"vllm:{name}" for name in VLLM_SAMPLES} <= found.keys()
        assert all((labels["model_name"], labels["engine"]) == ("a model", "0") for labels in found.values())


def test_a_step_counts_rows_tokens_and_time(metrics: ServerMetrics) -> None:
    update = progress(deltas=2)
    metrics.progress(update.step, update.deltas)
    metrics.progress(step(rows=2, nodes=0, accepted=0, hits=0), [])
    assert value(metrics, "vllm:generation_tokens_total") == 7
    assert value(metrics, "vllm:iteration_tokens_total_sum") == (20 - 14 + 5) + 2
    assert value(metrics, "pilotfish_rows_computed_total") == 22
    assert value(metrics, "pilotfish_rows_rejected_total") == 9
    assert value(metrics, "pilotfish_hits_total") == 1
    assert value(metrics, "pilotfish_misses_total") == 3
    assert value(metrics, "pilotfish_exposed_wait_seconds_total") == pytest.approx(0.004)
    parts = {"proposal": 0.004, "verify": 0.046, "coordination": 0.002}
    for part, seconds in parts.items():
        assert value(metrics, "pilotfish_step_seconds_sum", part=part) == pytest.approx(seconds)


def test_accepted_tokens_by_position_and_origin(metrics: ServerMetrics) -> None:
    metrics.progress(step(), [delta(4, 7, 3), delta(2, 7, 1), delta(1, 7, 0), delta(1, 0, 0)])
    per_position = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert value(metrics, "vllm:spec_decode_num_drafts_total") == 3  # the last one had no tree
    assert value(metrics, "vllm:spec_decode_num_draft_tokens_total") == 21
    assert value(metrics, "vllm:spec_decode_num_accepted_tokens_total") == 4
    assert [value(metrics, per_position, position=str(i)) for i in range(3)] == [2, 1, 1]
    assert sum(name == per_position for name, _, _ in samples(metrics)) == 3
    assert_values(metrics, "pilotfish_accepted_tokens_total", "origin", {"pool 0": 2, "ngram": 2})


def test_drops_of_pools_go_on_when_a_target_begins_at_zero(metrics: ServerMetrics, fleet: FleetMetrics) -> None:
    for late in (3, 5, 2):
        fleet.tell(serving(status(pools=(msgspec.structs.replace(POOL, drops={"late_nodes": late, "gaps": 0}),))))
    drops = "pilotfish_pool_drops_total"
    assert value(metrics, drops, pool="local", reason="late_nodes") == 7
    assert value(metrics, drops, pool="local", reason="gaps") == 0
    assert value(metrics, "pilotfish_pool_feature_bytes_total", pool="local") == POOL.feature_bytes
    assert value(metrics, "pilotfish_pool_feature_drops_total", pool="local", reason="stale") == 2
    fleet.tell(starting(0))
    assert value(metrics, drops, pool="local", reason="late_nodes") == 7


def test_a_request_is_counted_when_it_ends(metrics: ServerMetrics) -> None:
    serve_one(metrics, facts(tag="search"))
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="error") == 0
    assert value(metrics, "vllm:prompt_tokens_total") == 10
    sums = {"time_to_first_token_seconds": 1.0, "request_queue_time_seconds": 0.25, "request_decode_time_seconds": 1.0}
    sums |= {"request_inference_time_seconds": 1.75, "request_prefill_time_seconds": 0.75}
    sums |= {"e2e_request_latency_seconds": 2.25, "request_time_per_output_token_seconds": 1 / 3}
    sums |= {"inter_token_latency_seconds": 0.5}  # a chunk of three tokens
    sums |= {"request_prompt_tokens": 10, "request_generation_tokens": 4, "request_max_num_generation_tokens": 4}
    sums |= {"request_params_n": 1, "request_params_max_tokens": 64}
    for name, expected in sums.items():
        assert value(metrics, f"vllm:{name}_count") == 1, name
        assert value(metrics, f"vllm:{name}_sum") == pytest.approx(expected), name
    labels = {"tag": "search", "mode": "async"}
    assert value(metrics, "pilotfish_acceptance_rate_sum", **labels) == 0.25
    assert value(metrics, "pilotfish_accepted_tokens_per_verify_step_sum", **labels) == 2
    assert value(metrics, "pilotfish_request_tokens_total", kind="generation", **labels) == 4
    assert value(metrics, "pilotfish_requests_total", finished_reason="stop", **labels) == 1
    assert value(metrics, "pilotfish_time_per_output_token_seconds_count", **labels) == 1
    assert value(metrics, "pilotfish_requests_in_flight") == 0


def test_a_request_that_never_began_has_no_times(metrics: ServerMetrics) -> None:
    record = RequestRecord(metrics, facts(), arrived=1.0)
    assert value(metrics, "pilotfish_requests_in_flight") == 1
    record.finish(now=1.5, reason=FinishReason.ERROR)
    assert value(metrics, "vllm:request_success_total", finished_reason="error") == 1
    assert value(metrics, "vllm:request_prefill_time_seconds_count") == 0
    assert value(metrics, "vllm:e2e_request_latency_seconds_count") == 1
    assert value(metrics, "vllm:prompt_tokens_total") == 0
    assert "pilotfish_acceptance_rate_count" not in names(metrics)


def test_a_prompt_s_cached_tokens_count_once(metrics: ServerMetrics) -> None:
    """Two outputs of each of two prompts."""
    record = RequestRecord(metrics, RequestFacts((30, 5), 8, n=2), arrived=1.0)
    found: list[dict[str, int]] = [{"device": 16, "host": 3, "disk": 1}, {"device": 20}, {}, {"device": 4}]
    for index, cached in enumerate(found):
        record.update(index, Delta(1, index, [], "", [], [], queued=0.1, cached=cached), now=2.0)
        record.update(index, Delta(1, index, [], "", [], []), now=2.0)
    assert value(metrics, "vllm:prefix_cache_queries_total") == 35
    assert value(metrics, "vllm:prefix_cache_hits_total") == 16
    assert value(metrics, "vllm:external_prefix_cache_queries_total") == 19
    assert value(metrics, "vllm:external_prefix_cache_hits_total") == 4
    sources = {"device": 16, "host": 3, "disk": 1, "computed": 15}
    assert_values(metrics, "pilotfish_kv_prompt_tokens_total", "source", sources)


def test_preemptions_and_restarts_go_on_where_a_target_begins_anew(metrics: ServerMetrics, fleet: FleetMetrics) -> None:
    for preemptions in (3, 5, 5, 2, 4):
        fleet.tell(serving(status(preemptions=preemptions)))
    assert value(metrics, "vllm:num_preemptions_total") == 9
    fleet.tell(starting(1))
    fleet.tell(serving(status(preemptions=1), restarts=1))
    assert value(metrics, "pilotfish_target_restarts_total") == 1
    assert value(metrics, "pilotfish_target_ready") == 1
    assert value(metrics, "vllm:num_preemptions_total") == 10


def test_several_targets_are_told_of_together_and_each_by_its_name(metrics: ServerMetrics, fleet: FleetMetrics) -> None:
    """What each has counted goes on by itself: one that begins at zero takes nothing from the others' totals."""
    draft = msgspec.structs.replace(POOL, name="draft 0", own=True)
    shared = msgspec.structs.replace(POOL, name="tuesday's", revision="tuesday")
    for first, second, resumed in ((3, 10, 0), (5, 1, 2), (6, 4, 2)):
        busy = status(2, 750, first, pools=(draft, shared))
        idle = msgspec.structs.replace(status(0, 1000, second, pools=(draft, shared)), waiting=0)
        both = [ReplicaHealth("target 0", requests=2, status=busy), ReplicaHealth("target 1", restarts=1, status=idle)]
        fleet.tell([*both, *starting()], resumed, RoutedTokens(10 * first, first, second))
    assert value(metrics, "vllm:num_preemptions_total") == 6 + 10 + 4
    assert value(metrics, "vllm:num_requests_running") == 2 and value(metrics, "vllm:num_requests_waiting") == 1
    assert value(metrics, "vllm:kv_cache_usage_perc") == 1 - 1750 / 2000
    assert value(metrics, "vllm:cache_config_info", num_gpu_blocks="31") == 1
    assert value(metrics, "pilotfish_kv_used_bytes", tier="host") == 2 * 640
    assert value(metrics, "pilotfish_resumed_requests_total") == 2
    routed = {kind: value(metrics, "pilotfish_routed_tokens_total", kind=kind) for kind in vars(RoutedTokens())}
    assert routed == {"prompt": 60, "expected": 6, "found": 14, "missed": 0}
    assert value(metrics, "pilotfish_target_restarts_total") == value(metrics, "pilotfish_target_ready") == 1
    used = "pilotfish_replica_kv_usage"
    assert [value(metrics, used, replica=name) for name in ("target 0", "target 1", "target")] == [0.25, 0, 0]
    assert [value(metrics, "pilotfish_replica_requests", replica=f"target {i}") for i in (0, 1)] == [2, 0]
    assert value(metrics, "pilotfish_replica_ready", replica="target") == 0
    pools = {at["pool"] for name, at, _ in samples(metrics) if name == "pilotfish_pool_ready"}
    assert pools == {"target 0 draft 0", "target 1 draft 0", "tuesday's"}
    fleet.tell(both[:1])
    assert {at["replica"] for name, at, _ in samples(metrics) if name == used} == {"target 0"}


def test_tiers_of_kv(metrics: ServerMetrics, fleet: FleetMetrics) -> None:
    fleet.tell(serving(status()))
    used, capacity = "pilotfish_kv_used_bytes", "pilotfish_kv_capacity_bytes"
    assert_values(metrics, used, "tier", {"device": 250, "host": 640, "disk": 320})
    assert_values(metrics, capacity, "tier", {"device": 1000, "host": 6400, "disk": 64000})
    assert_values(metrics, "pilotfish_kv_evicted_tokens_total", "tier", {"device": 70, "host": 64, "disk": 128})
    moved = "pilotfish_kv_moved_bytes_total"
    assert [value(metrics, moved, direction="save", tier=tier) for tier in ("host", "disk")] == [1280, 640]
    assert [value(metrics, moved, direction="load", tier=tier) for tier in ("host", "disk")] == [100, 50]
    outcomes = {"saved": 4, "lost": 1, "given_up": 2, "recomputed": 3}
    assert_values(metrics, "pilotfish_kv_objects_total", "outcome", outcomes)
    damaged = "pilotfish_kv_damaged_objects_total"
    assert value(metrics, damaged, tier="host", reason="checksum") == 1
    assert value(metrics, damaged, tier="disk", reason="size") == 2
    assert value(metrics, "pilotfish_kv_failed_operations_total", tier="disk") == 3
    assert value(metrics, "pilotfish_kv_late_loads_total") == 1
    assert value(metrics, "pilotfish_kv_loading_seconds_total") == 0.5
    assert value(metrics, "pilotfish_kv_estimated_computing_seconds_total") == 2.0
    fleet.tell(starting(1))
    assert value(metrics, "pilotfish_kv_objects_total", outcome="saved") == 4
    assert not {used, capacity} & names(metrics)


def test_prefill_pools(metrics: ServerMetrics, fleet: FleetMetrics) -> None:
    fleet.tell(serving(status(prefill_pools=(prefill_pool(),))))
    gauges = {"ready": 1, "queued_tokens": 700, "free_slots": 50, "token_seconds": 0.002, "leases": 3}
    for name, expected in gauges.items():
        assert value(metrics, f"pilotfish_prefill_pool_{name}", pool="east") == expected
    assert value(metrics, "pilotfish_prefill_pool_transport", pool="east") == 1
    ended = {("shm", "whole"): 1, ("shm", "late"): 1, ("tcp", "gone"): 1}
    for (transport, outcome), count in ended.items():
        labels = {"pool": "east", "transport": transport, "outcome": outcome}
        assert value(metrics, "pilotfish_handovers_total", **labels) == count
    sums = {"tokens": (6, 3), "bytes": (4096, 100), "transfer_seconds": (0.75, 0.125), "hidden_seconds": (0.5, 0)}
    for name, (shm, tcp) in sums.items():
        assert value(metrics, f"pilotfish_handover_{name}_total", pool="east", transport="shm") == shm
        assert value(metrics, f"pilotfish_handover_{name}_total", pool="east", transport="tcp") == tcp
    refused = "pilotfish_prefill_pool_refused_total"
    assert [value(metrics, refused, pool="east", reason=why) for why in ("content", "stale")] == [2, 0]
    fleet.tell(starting(1))
    left = {name for name in names(metrics) if name.startswith("pilotfish_prefill_pool_")}
    assert left == {f"pilotfish_prefill_pool_refused_{suffix}" for suffix in ("total", "created")}


def test_only_the_revision_that_a_pool_runs_is_told(metrics: ServerMetrics, fleet: FleetMetrics) -> None:
    gauge = "pilotfish_pool_revision"
    for revision in ("monday", "", "tuesday"):
        fleet.tell(serving(status(pools=(msgspec.structs.replace(POOL, revision=revision),))))
        assert [at["revision"] for name, at, _ in samples(metrics) if name == gauge] == [revision] * bool(revision)
    fleet.tell(serving(status()))
    assert gauge not in names(metrics)


def test_only_the_transport_in_use_is_told(metrics: ServerMetrics, fleet: FleetMetrics) -> None:
    in_use = "pilotfish_prefill_pool_transport"
    for transport in ("shm", "", "tcp"):
        fleet.tell(serving(status(prefill_pools=(prefill_pool(transport),))))
        assert [at["transport"] for name, at, _ in samples(metrics) if name == in_use] == [transport] * bool(transport)
        assert value(metrics, "pilotfish_prefill_pool_ready", pool="east") == bool(transport)


def test_parts_of_hand_overs(metrics: ServerMetrics) -> None:
    record = RequestRecord(metrics, RequestFacts((30,), 8), arrived=1.0)
    record.update(0, Delta(1, 0, [], "", [], [], queued=0.1, cached={"host": 20}, handovers=[LOST, HANDED]), now=2.0)
    sums = {"queued": 0.5, "computing": 1.25, "exposed": 0.25, "lost": 0.5}
    for part, seconds in sums.items():
        assert value(metrics, "pilotfish_handover_seconds_sum", pool="east", part=part) == seconds
        assert value(metrics, "pilotfish_handover_seconds_count", pool="east", part=part) == 1
    sources = {"device": 0, "host": 20, "disk": 0, "prefill": 9, "computed": 1}
    assert_values(metrics, "pilotfish_kv_prompt_tokens_total", "source", sources)
    assert record.handed_over == 9
    metrics.handover(replace(HANDED, computing=0.0))  # the pool's last word was lost
    assert value(metrics, "pilotfish_handover_seconds_count", pool="east", part="exposed") == 1


def test_what_was_handed_over_and_then_found_counts_once(metrics: ServerMetrics) -> None:
    """A sequence that lost its KV before its first token finds what was handed over."""
    metrics.prefix(30, {"device": 27}, handed_over=29)
    assert_values(metrics, "pilotfish_kv_prompt_tokens_total", "source", {"device": 27, "prefill": 3, "computed": 0})


def test_a_target_that_is_gone_holds_nothing(metrics: ServerMetrics, fleet: FleetMetrics) -> None:
    fleet.tell(serving(status(running=2, free_slots=750, pools=(POOL,))))
    assert value(metrics, "vllm:kv_cache_usage_perc") == 0.25
    assert value(metrics, "vllm:cache_config_info", num_gpu_blocks="15", block_size="64", cache_dtype="float32") == 1
    assert value(metrics, "pilotfish_pool_step_seconds", pool="local") == pytest.approx(0.004)
    assert value(metrics, "pilotfish_pool_cached_tokens_total", pool="local") == 9
    fleet.tell(starting(0))
    assert value(metrics, "vllm:kv_cache_usage_perc") == value(metrics, "vllm:num_requests_running") == 0
    assert value(metrics, "vllm:num_requests_waiting") == value(metrics, "pilotfish_target_ready") == 0
    assert "pilotfish_pool_ready" not in names(metrics)


def test_http_answers(metrics: ServerMetrics) -> None:
    for method, code in (("POST", 200), ("POST", 204), ("POST", 429), ("BREW", 405)):
        metrics.http("/v1/completions", method, code)
    assert value(metrics, "http_requests_total", method="POST", status="2xx", handler="/v1/completions") == 2
    assert value(metrics, "http_requests_total", method="POST", status="4xx") == 1
    assert value(metrics, "http_requests_total", method="other", status="4xx") == 1


def test_tags_are_bounded(metrics: ServerMetrics) -> None:
    for i in range(MAX_TAGS + 10):
        serve_one(metrics, facts(tag=f"tag{i}"))
    serve_one(metrics, facts())
    serve_one(metrics, facts(tag="tag0"))
    tags = {labels["tag"] for _, labels, _ in samples(metrics) if "tag" in labels}
    assert len(tags) == MAX_TAGS + 2
    assert value(metrics, "pilotfish_requests_total", tag="other") == 10
    assert value(metrics, "pilotfish_requests_total", tag="none") == 1
    assert value(metrics, "pilotfish_requests_total", tag="tag0") == 2


@pytest.mark.parametrize("tag", ["a", "team/search:v1.2_x-y", "0" * 64])
def test_tags_that_are_allowed(tag: str) -> None:
    assert checked_tag(tag) == tag


@pytest.mark.parametrize("tag", ["", "-a", "a b", "a\n", 'a"', "ä", "0" * 65, 5, None, ["a"]])
def test_tags_that_are_not(tag: Any) -> None:
    with pytest.raises(ParameterError, match=r"^X-Request-Tag: .* is not allowed; expected 1 to 64 letters") as error:
        checked_tag(tag, "X-Request-Tag")
    assert "\n" not in str(error.value)


# -- shadows


def shadow_samples(*reports: ShadowReport | None) -> dict[tuple[str, ...], float]:
    """Samples of shadows once a target has said this, one after the other; None: it starts again."""
    metrics = ServerMetrics("a model")
    fleet = FleetMetrics(metrics)
    for report in reports:
        fleet.tell(starting(1) if report is None else serving(status(shadows=(report,))))
    return {
        (name.removeprefix("pilotfish_shadow_"), *(v for k, v in at.items() if k not in ("model_name", "pool"))): number
        for name, at, number in samples(metrics)
        if "_shadow_" in name and not name.endswith("_created")
    }


def test_what_a_shadow_has_told() -> None:
    found = shadow_samples(SHADOW)
    assert found["ready",] == 1 and found["revision", "tuesday"] == 1
    assert (found["requests_total",], found["steps_total",], found["trees_total",]) == (3, 100, 90)
    assert (found["late_steps_total",], found["hits_total",], found["accepted_tokens_total",]) == (10, 40, 150)
    assert [found["tried_per_pos_total", depth] for depth in "01"] == [90, 60]
    assert [found["accepted_per_pos_total", depth] for depth in "01"] == [60, 45]
    assert (found["tokens_per_second",], found["live_tokens_per_second",], found["error",]) == (80, 50, -0.02)
    assert found["cpu_seconds_total",] == 0.5


def test_rates_and_revisions_go_with_the_shadow() -> None:
    found = shadow_samples(SHADOW, msgspec.structs.replace(SHADOW, revision="wednesday"))
    assert found["revision", "wednesday"] == 1 and ("revision", "tuesday") not in found
    found = shadow_samples(SHADOW, None)
    assert not any(key[0] in ("ready", "error", "revision", "tokens_per_second") for key in found)
    assert found["steps_total",] == 100
