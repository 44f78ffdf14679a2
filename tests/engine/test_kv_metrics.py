"""Metrics of tiers, after a run that used them."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support import make_engine

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.engine.targets.replica import ReplicaHealth
from pilotfish.engine.targets.status import identity_of, status_of
from pilotfish.kv import tiers as tiers_module
from pilotfish.kv.tiers import KVTiers
from pilotfish.server.observe.fleet_metrics import FleetMetrics
from pilotfish.server.observe.metrics import ServerMetrics
from pilotfish.server.observe.request_records import RequestFacts, RequestRecord
from pilotfish.wire.channel import decoded, encode
from pilotfish.wire.serving import SERVER_DECODER, Status

#: Room for one of the prompts, whose first 256 tokens are 4 objects.
SLOTS, LENGTH, IN_OBJECTS = 512, 300, 256
PROMPTS = [[3 + (place + 7 * i) % 97 for i in range(LENGTH)] for place in range(6)]
LIMIT = 20.0  # seconds


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is there is loaded, however long it takes."""
    monkeypatch.setattr(KVTiers, "computed", lambda *_: None)
    for name in ("STUCK", "LEAST"):
        monkeypatch.setattr(tiers_module, name, 1000.0)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_they_tell_what_came_from_where(tier: str, llama: Path, tmp_path: Path) -> None:
    where = {"kv_host_memory": 0.01} if tier == "host" else {"kv_disk": tmp_path / "kv", "kv_disk_size": 0.01}
    metrics = ServerMetrics("tiny")
    with make_engine(llama, kv_slots=SLOTS, **where) as engine:
        for prompt in PROMPTS + PROMPTS:
            serve(engine, prompt, metrics)
        status = decoded(SERVER_DECODER, encode(status_of(engine, identity_of(engine), "")))
        assert isinstance(status, Status) and engine.tiers is not None
        FleetMetrics(metrics).tell([ReplicaHealth("target", status=status)])
        counts, size = engine.tiers.counts, engine.memory.target.slot
    loaded = len(PROMPTS) * IN_OBJECTS
    assert status.tier_counts == counts and counts.saved >= loaded // 64 and counts.loading_seconds > 0
    assert told(metrics, "kv_prompt_tokens_total", source=tier) == loaded
    assert told(metrics, "kv_prompt_tokens_total", source="computed") == 2 * len(PROMPTS) * LENGTH - loaded
    assert told(metrics, "kv_objects_total", outcome="saved") == counts.saved
    assert told(metrics, "kv_moved_bytes_total", direction="load", tier=tier) == loaded * size
    assert told(metrics, "kv_moved_bytes_total", direction="save", tier=tier) == 64 * size * counts.saved
    assert told(metrics, "kv_loading_seconds_total") == counts.loading_seconds
    assert told(metrics, "kv_evicted_tokens_total", tier="device") > len(PROMPTS) * LENGTH
    assert told(metrics, "kv_capacity_bytes", tier="device") == SLOTS * size
    assert 0 < told(metrics, "kv_used_bytes", tier=tier) <= told(metrics, "kv_capacity_bytes", tier=tier)


def serve(engine: Engine, prompt: list[int], metrics: ServerMetrics) -> None:
    """A request, until all copies of it are made and all files are written."""
    engine.submit(prompt, SamplingParams(max_tokens=8, seed=7))
    record = RequestRecord(metrics, RequestFacts((len(prompt),), 8), arrived=0.0)
    while engine.busy:
        for delta in engine.step():
            record.update(0, delta, now=1.0)
    assert engine.tiers is not None and engine.tiers.settle(LIMIT)


def told(metrics: ServerMetrics, name: str, **labels: str) -> float:
    """The one sample of a metric of ours with these labels."""
    families = text_string_to_metric_families(metrics.render()[0].decode())
    samples = [sample for family in families for sample in family.samples if sample.name == f"pilotfish_{name}"]
    (value,) = [sample.value for sample in samples if labels.items() <= sample.labels.items()]
    return value
