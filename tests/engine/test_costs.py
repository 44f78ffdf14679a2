"""Paced engines: the same tokens, every forward counted, none of those that were measured at start."""

from itertools import chain, repeat
from pathlib import Path

import numpy as np
import pytest
from support import SNIPPETS, make_engine, run

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.budget import FixedBudget
from pilotfish.engine import trial
from pilotfish.engine.engine import Engine
from pilotfish.model.pacer import Pacer
from pilotfish.workers.lm import LMDrafter
from pilotfish.workers.records import StepRecord

BOTH = "target=1.5ms,draft=500us"
PARAMS = SamplingParams(max_tokens=12, seed=3)


def paced(engine: Engine) -> dict[str, Pacer]:
    return {pacing.role: pacing for pacing in engine.pacing()}


@pytest.mark.parametrize("budget", ["fixed", "auto"])
def test_pace_changes_no_token_and_every_forward_counts(llama: Path, draft: Path, budget: str) -> None:
    options = {"mode": "sync", "draft": draft, "drafter": "lm", "budget": budget, "max_rows": 16}
    engine = make_engine(llama, pace=BOTH, **options)
    assert [p.forwards for p in engine.pacing()] == [0, 0]
    steps = list[StepRecord]()
    engine.worker.observe = steps.append
    assert run(engine, SNIPPETS[:1], [PARAMS]) == run(make_engine(llama), SNIPPETS[:1], [PARAMS])
    after = paced(engine)
    assert after["target"].forwards == len(steps)
    assert after["draft"].forwards > 0 or budget == "auto"
    assert after["target"].pace.text == "1.5ms" and after["draft"].pace.text == "500us"


def test_start_measures_the_emulated_devices(llama: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor that is paced is paced there too; only its count starts anew."""
    held: list[tuple[str, int]] = []
    monkeypatch.setattr("pilotfish.model.pacer.Pacer.hold", lambda self, _, rows: held.append((self.role, rows)))
    make_engine(llama, mode="sync", draft=draft, drafter="lm", budget="auto", max_rows=16, width=3, pace=BOTH)
    assert {rows for role, rows in held if role == "target"} >= {1, 2, 4}
    assert {rows for role, rows in held if role == "draft"} == {3}


def test_each_model_alone(llama: Path, draft: Path) -> None:
    sync = {"mode": "sync", "draft": draft, "drafter": "lm"}
    assert list(paced(make_engine(llama, pace="target=1ms", **sync))) == ["target"]
    only_draft = make_engine(llama, pace="draft=1ms", **sync)
    assert list(paced(only_draft)) == ["draft"] and only_draft.worker.executor.pacer is None
    assert isinstance(only_draft.drafter, LMDrafter) and only_draft.drafter.pacer is not None
    assert make_engine(llama, **sync).pacing() == []
    assert list(paced(make_engine(llama, draft=draft, mode="off", pace=BOTH))) == ["target"]  # it does not run


# -- what forwards cost is measured at start, and a draft that cannot pay is told


def test_costs_of_every_row_count_up_to_a_full_step(llama: Path) -> None:
    loaded = make_engine(llama, max_rows=24)
    measured = trial.step_costs(loaded.worker.executor, loaded.config.max_rows)
    seconds = measured.over(np.arange(1, 25))
    assert (seconds > 0).all() and (np.diff(seconds) >= 0).all()


def test_costs_of_a_long_context(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A millisecond for 4,080 tokens, and half of one for each further row that reads them."""
    executor = make_engine(llama, kv_slots=5000).worker.executor
    monkeypatch.setattr(executor, "context", 8192)
    monkeypatch.setattr(trial, "forward_seconds", lambda _, rows, before: (rows + 1) * before / 4080 * 0.5e-3 + rows)
    found = trial.context_costs(executor, {1: 1.0, 16: 16.0})
    assert found.seconds(4080, 0) == pytest.approx(1e-3) and found.seconds(4080, 2) == pytest.approx(2e-3)
    monkeypatch.setattr(executor, "context", 512)
    assert trial.context_costs(executor, {1: 1.0, 16: 16.0}) == trial.NO_CONTEXT


def test_a_draft_that_is_slower_than_it_is_worth_is_told(
    llama: Path, draft: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = chain([0.5], repeat(0.001))  # the draft's forward, then the target's
    monkeypatch.setattr(trial, "forward_seconds", lambda *_, **__: next(seconds))
    make_engine(llama, draft=draft, mode="sync", budget="auto")
    (message,) = (record.getMessage() for record in caplog.records if record.name.startswith("pilotfish"))
    assert message.startswith("a draft forward takes 500.00 ms and saves ") and "mostly rest" in message


def test_a_fixed_budget_measures_nothing(llama: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "step_costs", lambda *_: pytest.fail("measured"))
    loaded = make_engine(llama, draft=draft, mode="sync", budget="fixed")
    assert isinstance(loaded.worker.budget, FixedBudget)
