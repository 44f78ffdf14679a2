"""The bench of shadows, over a tiny pair whose pools are threads; no test says how fast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Measure
from inline_drafts import draft_worker

from pilotfish.bench import programs
from pilotfish.bench.report import Spread
from pilotfish.bench.shadow import run_shadow, shadow_results
from pilotfish.config.engine import EngineConfig


@pytest.fixture
def _pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with ExitStack() as stack:
        endpoints = iter([f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/shadow"])

        @contextmanager
        def start(config: EngineConfig, *_: object) -> Iterator[SimpleNamespace]:
            endpoint = next(endpoints)
            stack.enter_context(draft_worker(config, endpoint))
            yield SimpleNamespace(told={"endpoint": endpoint})

        monkeypatch.setattr(programs, "start_pool", start)
        yield


@pytest.mark.usefixtures("_pools")
def test_runs_without_and_with_a_shadow_take_turns(measure: Measure) -> None:
    sizes = {
        "limit": 2,
        "streams": 2,
        "repeats": 2,
        "max_tokens": 12,
        "pace": "target=4ms,draft=1ms",
        "budget": "fixed",
    }
    results = measure(run_shadow, "shadow", **sizes).results
    assert [row["live"] for row in results["engines"]] == ["off", "async"]
    for row in results["engines"]:
        assert row["without"].count == row["with_shadow"].count == 2 and row["equal_outputs"] == 1
        assert row["tokens_per_step"] >= 1 and row["promised"] > 0 and row["cpu_share"] > 0
    assert [promise["beside"] for promise in results["promises"]] == ["off", "async"]
    assert results["promises"][1]["live"] == results["engines"][1]["live_rate"] > 0


@pytest.mark.parametrize(("promised", "kept", "holds"), [(106, 0.985, True), (108, 0.985, False), (106, 0.97, False)])
def test_it_holds_where_it_is_cheap_and_right(promised: float, kept: float, holds: bool) -> None:
    off = {"live": "off", "kept": Spread.of([1.0, kept, 0.5]), "live_rate": 50.0, "promised": promised}
    results = shadow_results([off, off | {"live": "async", "live_rate": 100.0, "promised": 95.0}])
    assert [promise["error"] for promise in results["promises"]] == pytest.approx([promised / 100 - 1, -0.05])
    assert results["holds"] == holds
