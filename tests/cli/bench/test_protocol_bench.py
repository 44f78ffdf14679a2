"""The bench of the draft protocol's costs; no test says how fast."""

from __future__ import annotations

import draft_protocol
import pytest
from draft_protocol import ASKED, LEVELS, Costs, DraftExchange, costs_of, run_protocol
from harness import Options

from pilotfish.cli.bench.report import ProgressBar


@pytest.mark.parametrize("name", ASKED)
def test_both_sides_work(name: str) -> None:
    """Trees are attached, guesses are committed, and feedback comes where it is asked for."""
    exchange = DraftExchange(3, ASKED[name])
    for _ in range(8):
        exchange.step()
    counts, (pool,) = exchange.machine.counts, exchange.machine.pools
    assert counts.opened == 3 and counts.hits > 10 and counts.trees >= 8 * LEVELS
    assert not pool.drops.occurred.keys() - {"late_nodes"}
    assert set(ASKED[name]) <= set(pool.load.capabilities if pool.load is not None else ())
    assert (pool.score.verified > 100) == ("feedback" in ASKED[name])
    assert exchange.costs.levels >= 8 * LEVELS and exchange.costs.from_draft > 0


def test_feedback_costs_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_protocol, "STEPS", 4)
    rows = run_protocol(Options(sequences=[1, 2], repeats=1), ProgressBar()).results["costs"]
    assert [(row["sequences"], row["asks for"]) for row in rows] == [(n, name) for n in (1, 2) for name in ASKED]
    six, _, feedback = rows[3:]
    assert feedback["bytes_a_step"] > six["bytes_a_step"] > rows[0]["bytes_a_step"] > 0


def test_figures() -> None:
    """Bytes and times are of a level or a step; ratios are taken within rounds."""
    own = [Costs(180, 0.09, 0.018, 0.06, 18_000, 6_000), Costs(180, 0.18, 0.036, 0.12, 18_000, 6_000)]
    other = [Costs(180, 0.09, 0.018, 0.06, 9_000, 6_000), Costs(180, 0.09, 0.018, 0.06, 9_000, 6_000)]
    row = costs_of(own, other)
    assert (row["bytes_a_level"], row["bytes_a_step"]) == (100, 100)
    assert row["draft_us_a_level"].median == pytest.approx(750)
    assert row["target_us_a_step"].maximum == pytest.approx(2000)
    assert (row["over_first"].minimum, row["over_first"].maximum) == pytest.approx((1.0, 2.0))
