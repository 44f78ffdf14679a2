"""What a server would feed its metrics, of a few requests."""

import re
from dataclasses import replace

from pilotfish.core.cache.tiers import TierCounts, TierUse
from pilotfish.core.prefilling.handover import HandOverReport, HandOverTotals
from pilotfish.core.scheduling.request import FinishReason
from pilotfish.engine.targets.replica import ReplicaHealth
from pilotfish.server.bodies.requests import FeedbackRequest
from pilotfish.server.observe.feedback import Feedback
from pilotfish.server.observe.fleet_metrics import FleetMetrics
from pilotfish.server.observe.metrics import ServerMetrics
from pilotfish.server.observe.request_records import RequestFacts, RequestRecord, ServedRequest
from pilotfish.wire import serving as wire

#: A line of the text format, and a label within it.
SAMPLE, LABEL = re.compile(r"([\w:]+)(?:\{(.*)\})? (\S+)"), re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
IDENTITY = wire.Identity(
    "target", "async", "float32", 2048, 300, kv_slots=1000, longest=1000, max_requests=8, max_nodes=16
)
DROPS = {"late_nodes": 7, "resyncs": 1}
FEATURES = {"feature_bytes": 8192, "feature_drops": {"stale": 2, "damaged": 0}}
POOL = wire.PoolLoad("local", True, 3, 50, 4.0, 0.5, drops=DROPS, cached=9, revision="monday", **FEATURES)
SCORE = {"requests": 3, "steps": 100, "trees": 90, "late": 10, "accepted": 150, "hits": 40}
SCORE |= {"tried_by_depth": [90, 60], "accepted_by_depth": [60, 45], "error": -0.02, "cpu_seconds": 0.5}
SCORE |= {"tokens_per_step": 2.5, "tokens_per_second": 80.0, "live_tokens_per_second": 50.0}
SHADOW = wire.ShadowReport("candidate", ready=True, revision="tuesday", **SCORE)
#: Hand-overs of one sequence: one that the pool lost, then one that brought all.
LOST = HandOverReport("east", "tcp", "gone", began=0.25, seconds=0.5, size=100, tokens=3)
HANDED = HandOverReport("east", "shm", "whole", 1.0, 2.0, 0.5, 1.25, 0.75, 0.75, size=4096, tokens=6, cached=2)


def prefill_pool(transport: str = "shm", tokens: int = 6, late: int = 1) -> wire.PrefillPoolLoad:
    shm = HandOverTotals({"whole": 1, "late": late}, tokens, size=4096, transfer=0.75, hidden=0.5)
    tcp = HandOverTotals({"gone": 1}, 3, size=100, transfer=0.125)
    totals, refused = {"shm": shm, "tcp": tcp}, {"content": 2, "stale": 0}
    return wire.PrefillPoolLoad("east", bool(transport), transport, 700, 50, 2.0, 3, totals, refused)


TIERS = [
    TierUse("device", 250, 1000, evicted=70),
    TierUse("host", 640, 6400, 1280, evicted=64, damaged={"checksum": 1}),
    TierUse("disk", 320, 64000, 640, evicted=128, damaged={"size": 2, "checksum": 0}, failed=3),
]


def status(
    running: int = 2,
    free_slots: int = 750,
    preemptions: int = 0,
    pools: tuple[wire.PoolLoad, ...] = (),
    prefill_pools: tuple[wire.PrefillPoolLoad, ...] = (),
    shadows: tuple[wire.ShadowReport, ...] = (),
) -> wire.Status:
    both = list(pools), list(prefill_pools)
    tiers = TIERS, tier_counts()
    return wire.Status(IDENTITY, running, 1, free_slots, preemptions, "first", 0, *both, *tiers, list(shadows))


def serving(status: wire.Status, restarts: int = 0) -> list[ReplicaHealth]:
    """A target that has told this."""
    return [ReplicaHealth("target", status=status, restarts=restarts)]


def starting(restarts: int = 0) -> list[ReplicaHealth]:
    return [ReplicaHealth("target", ready=False, reason="target: loading", restarts=restarts)]


def tier_counts(saved: int = 4, loading_seconds: float = 0.5) -> TierCounts:
    moved = {"host": 100, "disk": 50}
    counts = TierCounts(saved, lost=1, given_up=2, recomputed=3, late=1, moved_bytes=moved, computing_seconds=2.0)
    return replace(counts, loading_seconds=loading_seconds)


def step(rows: int = 20, nodes: int = 14, accepted: int = 5, hits: int = 1) -> wire.StepReport:
    times = {"at": 1.0, "draft": 0.002, "forward": 0.02, "verify": 0.003, "coordination": 0.001, "verified": 1.025}
    counts = {"sequences": 2, "rows": rows, "nodes": nodes, "accepted": accepted, "hits": hits}
    return wire.StepReport(**times, **counts, committed=accepted + 2)


def delta(
    tokens: int, nodes: int, accepted: int, at: float = 1.0, index: int = 0, reason: str | None = None
) -> wire.Delta:
    finish = None if reason is None else wire.Finish(FinishReason(reason), None)
    verified = [wire.Verified(at, tokens, nodes, accepted, ["pool 0"] * (accepted - 1) + ["ngram"] * (accepted > 0))]
    return wire.Delta("r", index, [0] * tokens, "", [0] * tokens, verified, queued=0.25, finish=finish)


def progress(deltas: int = 2) -> wire.StepProgress:
    """Of its outputs the first half accepts 4 nodes of 7, the others 1."""
    each = [(5, 4) if i < deltas / 2 else (2, 1) for i in range(deltas)]
    return wire.StepProgress(0, step(), [delta(tokens, 7, accepted) for tokens, accepted in each])


def facts(tag: str | None = None) -> RequestFacts:
    return RequestFacts(prompts=(10,), max_tokens=64, mode="async", streaming=True, tag=tag)


def serve_one(metrics: ServerMetrics, asked: RequestFacts) -> None:
    """A request of two chunks: 1 token, then 3 of which 2 were drafted."""
    record = RequestRecord(metrics, asked, arrived=10.0)
    record.update(0, delta(1, 0, 0, at=1.0), now=11.0)
    record.update(0, delta(3, 8, 2, at=1.5, reason="stop"), now=12.0)
    record.finish(now=12.25)


def everything(metrics: ServerMetrics) -> None:
    """Traffic that leaves a sample in every family."""
    FleetMetrics(metrics).tell(serving(status(pools=(POOL,), prefill_pools=(prefill_pool(),), shadows=(SHADOW,))))
    metrics.handover(HANDED)
    update = progress()
    metrics.progress(update.step, update.deltas)
    serve_one(metrics, facts(tag="search"))
    feedback = Feedback(metrics)
    feedback.remember("me", ["x"], ServedRequest("search", "sync", 12, 4))
    feedback.add("me", FeedbackRequest(request_id="x", success=True))
    metrics["pilotfish_requests_rejected", "429"].inc()
    metrics.http("/v1/completions", "POST", 200)
    for name in ("steps", "accepted_tokens", "tokens", "token_seconds"):
        metrics[f"pilotfish_variant_{name}", "next"].inc()
    metrics["pilotfish_variant_share", "next"].set(1.0)
    metrics["pilotfish_variant_events", "next", "cut"].inc()
    metrics["pilotfish_canary_replays", "equal"].inc()


def value(metrics: ServerMetrics, name: str, **labels: str) -> float:
    """The one sample of this name and labels; model_name and engine need no mention."""
    found = [v for sample, all_labels, v in samples(metrics) if sample == name and labels.items() <= all_labels.items()]
    assert len(found) == 1, f"{name}{labels}: {len(found)} samples"
    return found[0]


def samples(metrics: ServerMetrics) -> list[tuple[str, dict[str, str], float]]:
    """prometheus_client's own parser takes half a second for all families."""
    lines = metrics.render()[0].decode().splitlines()
    found = [match for line in lines if not line.startswith("#") and (match := SAMPLE.fullmatch(line))]
    return [(match[1], dict(LABEL.findall(match[2] or "")), float(match[3])) for match in found]
