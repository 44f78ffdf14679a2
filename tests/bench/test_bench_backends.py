"""The bench of back-ends of drafts, on a tiny pair; no test says how fast."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import pytest
from conftest import Measure
from sizes import in_soak

from pilotfish.bench import backends
from pilotfish.bench.backends import LevelCase, levels_by_leaves, parse_backends, run_backends
from pilotfish.bench.leveller import CONTEXT, LEVELS, MOST_LEAVES, MOST_SESSIONS, SLOTS, Leveller
from pilotfish.bench.report import Spread
from pilotfish.core.scheduling.executor import Outcome, Sampling, SequenceRows
from pilotfish.engine.drafts import draft_backends
from pilotfish.errors import InputError, ParameterError


class Recorder:
    """Keeps what it was to run; a row's ancestors must have been computed."""

    num_slots, context, vocab_size, deepest = SLOTS, 2 * CONTEXT, 300, 1 << 20

    def __init__(self) -> None:
        self.levels: list[tuple[Sequence[SequenceRows], Sampling]] = []

    def padded(self, rows: int) -> int:
        return rows

    def execute(self, rows: Sequence[SequenceRows], sampling: Sampling) -> Outcome:
        self.levels.append((rows, sampling))
        return Outcome(np.zeros(0, np.int64))


@pytest.mark.parametrize(("sessions", "leaves"), [(1, 1), (1, MOST_LEAVES), (MOST_SESSIONS, 8)])
def test_levels_grow_below_each_other(sessions: int, leaves: int) -> None:
    executor = Recorder()
    leveller = Leveller(executor, children=3)
    contexts = [rows.prefix_slots for (rows,), _ in executor.levels]
    assert len(np.unique(np.concatenate(contexts))) == MOST_SESSIONS * CONTEXT
    executor.levels.clear()
    assert len(leveller.seconds(sessions, leaves)) == LEVELS == len(executor.levels)
    before: set[tuple[int, ...]] = {()}
    slots = list[int]()
    for depth, (rows, sampling) in enumerate(executor.levels, 1):
        assert len(rows) == sessions and len(sampling) == leaves == sum(len(one.nodes) for one in rows)
        assert (sampling.children, set(sampling.positions)) == (3, {CONTEXT + depth})
        paths = [(tuple(path), session) for session, one in enumerate(rows) for path in one.nodes.paths.tolist()]
        assert all(path[:-1] in before for path, _ in paths)
        before, slots = {path for path, _ in paths}, slots + [path[-1] for path, _ in paths]
    assert len(set(slots)) == LEVELS * leaves and max(slots) < SLOTS and min(slots) >= MOST_SESSIONS * CONTEXT


def test_figures() -> None:
    """Ratios are taken within rounds."""
    cases = [LevelCase(name, 1, 8) for name in ("pilotfish", "openvino")]
    times = {cases[0].name: [0.001, 0.002, 0.004], cases[1].name: [0.003, 0.004, 0.004]}
    own, theirs = levels_by_leaves(cases, times)
    assert (own["backend"], own["leaves"], own["over_first"]) == ("pilotfish", 8, 1)
    assert theirs["level_ms"] == Spread.of([3.0, 4.0, 4.0]) and theirs["over_first"] == 2


@pytest.mark.parametrize("text", ["", "pilotfish,", "tensorrt", "pilotfish,pilotfish"])
def test_back_ends_are_named_once(text: str) -> None:
    assert parse_backends("pilotfish") == ["pilotfish"]
    with pytest.raises(ParameterError, match="backends"):
        parse_backends(text)


def test_an_engine_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_backends, "find_spec", lambda _: None)
    with pytest.raises(InputError, match="backend: openvino needs openvino, not installed here"):
        parse_backends("pilotfish,openvino")


@in_soak
@pytest.mark.skipif(find_spec("openvino") is None, reason="needs openvino")
def test_backends(measure: Measure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "LEAVES", (4,))
    sizes = {"repeats": 1, "max_tokens": 8, "paces": "target=2ms none", "threads": 1, "kv_slots": 1024}
    report = measure(run_backends, "backends", backends="pilotfish,openvino", **sizes)
    levels, speed = report.results["levels"], report.results["speed"]
    assert [(row["backend"], row["sessions"]) for row in levels] == [
        ("pilotfish", 1), ("pilotfish", 4), ("openvino", 1), ("openvino", 4),
    ]  # fmt: skip
    assert all(row["level_ms"].minimum > 0 for row in levels)
    assert [row["pace"] for row in speed] == ["target=2ms"] * 3 + ["none"] * 3
    assert [row["contestant"] for row in speed] == 2 * ["off", "pilotfish", "openvino"]
    assert all(row["equal_outputs"] == 1 for row in speed) and not report.failed
