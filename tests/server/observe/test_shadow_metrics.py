"""Metrics of shadows: sums that outlive a target, rates that do not."""

from __future__ import annotations

from msgspec.structs import replace
from server_traffic import SHADOW, samples, serving, starting, status

from pilotfish.server.observe.fleet_metrics import FleetMetrics
from pilotfish.server.observe.metrics import ServerMetrics
from pilotfish.wire.serving import ShadowReport


def told(*reports: ShadowReport | None) -> dict[tuple[str, ...], float]:
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
    found = told(SHADOW)
    assert found["ready",] == 1 and found["revision", "tuesday"] == 1
    assert (found["requests_total",], found["steps_total",], found["trees_total",]) == (3, 100, 90)
    assert (found["late_steps_total",], found["hits_total",], found["accepted_tokens_total",]) == (10, 40, 150)
    assert [found["tried_per_pos_total", depth] for depth in "01"] == [90, 60]
    assert [found["accepted_per_pos_total", depth] for depth in "01"] == [60, 45]
    assert (found["tokens_per_second",], found["live_tokens_per_second",], found["error",]) == (80, 50, -0.02)
    assert found["cpu_seconds_total",] == 0.5


def test_rates_and_revisions_go_with_the_shadow() -> None:
    found = told(SHADOW, replace(SHADOW, revision="wednesday"))
    assert found["revision", "wednesday"] == 1 and ("revision", "tuesday") not in found
    found = told(SHADOW, None)
    assert not any(key[0] in ("ready", "error", "revision", "tokens_per_second") for key in found)
    assert found["steps_total",] == 100
