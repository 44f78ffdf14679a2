"""What forwards cost is measured at start, and a draft that cannot pay is told."""

from __future__ import annotations

from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pytest
from support import SNIPPETS, assert_idle, make_engine, run

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.budget import AdaptiveBudget, FixedBudget
from pilotfish.engine import costs


def test_costs_of_every_row_count_up_to_a_full_step(llama: Path) -> None:
    loaded = make_engine(llama, max_rows=24)
    measured = costs.step_costs(loaded.worker.executor, loaded.config.max_rows)
    seconds = measured.over(np.arange(1, 25))
    assert (seconds > 0).all() and (np.diff(seconds) >= 0).all()


def test_measuring_leaves_nothing_behind(llama: Path, draft: Path) -> None:
    prompt, params = SNIPPETS[0], SamplingParams(max_tokens=20, seed=1)
    loaded = make_engine(llama, draft=draft, mode="sync", budget="auto")
    assert isinstance(loaded.worker.budget, AdaptiveBudget)
    assert_idle(loaded)
    assert run(loaded, [prompt], [params]) == run(make_engine(llama), [prompt], [params])


def test_a_draft_that_is_slower_than_it_is_worth_is_told(
    llama: Path, draft: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = chain([0.5], repeat(0.001))  # the draft's forward, then the target's
    monkeypatch.setattr(costs, "forward_seconds", lambda *_: next(seconds))
    make_engine(llama, draft=draft, mode="sync", budget="auto")
    (message,) = (record.getMessage() for record in caplog.records if record.name.startswith("pilotfish"))
    assert message.startswith("a draft forward takes 500.00 ms and saves ") and "mostly rest" in message


def test_a_fixed_budget_measures_nothing(llama: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "step_costs", lambda *_: pytest.fail("measured"))
    loaded = make_engine(llama, draft=draft, mode="sync", budget="fixed")
    assert isinstance(loaded.worker.budget, FixedBudget)
