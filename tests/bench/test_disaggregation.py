"""The bench of prompts that arrive among decoding sequences."""

from __future__ import annotations

import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
from msgspec import structs

from pilotfish.bench.disaggregation import ALL_HANDED, UNDISTURBED, LoadCell, PacedForward, cell_rows, combined
from pilotfish.bench.loaded import LoadedEngine
from pilotfish.bench.offered_loads import (
    ArrivingPrompt,
    LoadedRun,
    OfferedLoad,
    TokenRing,
    joined_runs,
    poisson_times,
    split_load,
)
from pilotfish.config.engine import EngineConfig
from pilotfish.core.prefilling.handover import WHOLE, HandOverReport
from pilotfish.engine.engine import Engine

CELL = LoadCell(1000, 2000)


def test_an_engine_under_load_tells_what_came_when(config: EngineConfig) -> None:
    arrivals = [ArrivingPrompt(0.0, [5, 6, 7]), ArrivingPrompt(0.05, [8] * 40)]
    paced = replace(config, mode="off", draft=None, pace="target=4ms")
    with Engine(paced) as engine:
        load = OfferedLoad([[1, 2], [3, 4]], arrivals, 0.3, 4, 32, "one")
        run = LoadedEngine(engine, load).play()
        again = LoadedEngine(engine, structs.replace(load, streams=[], rows=16, salt="another")).play()
        assert not engine.busy
    assert run.outputs == again.outputs and [len(tokens) for tokens in run.outputs] == [4, 4]
    assert min(run.gaps) > 0 and not again.gaps
    assert all(first >= 4 for first in run.first_tokens) and run.tokens > 0
    assert run.seconds >= 0.3 and run.forwards >= again.forwards > 0


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    times = list(poisson_times(5.0, 2000.0, seed=3))
    gaps = [b - a for a, b in pairwise(times)]
    assert len(times) == pytest.approx(10_000, rel=0.05) and times == sorted(times) and times[-1] < 2000
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.05)  # as of an exponential
    assert list(poisson_times(10.0, 2000.0, seed=3))[:5] == pytest.approx([at / 2 for at in times[:5]])


def test_prompts_are_cut_out_of_one_text_that_begins_again() -> None:
    ring, other = TokenRing(range(10), seed=0), TokenRing(range(10), seed=0)
    cut = ring.cut(25)
    assert len(cut) == 25 and all((b - a) % 10 == 1 for a, b in pairwise(cut))
    assert other.cut(25) == cut and len({tuple(ring.cut(3)) for _ in range(50)}) == 10


def loaded(*first_tokens: float, began: float = 0.0, gaps: tuple[float, ...] = (10.0,), overruns: int = 0) -> LoadedRun:
    outputs = [[int(value)] for value in first_tokens]
    return LoadedRun(began, 2.0, list(gaps), list(first_tokens), outputs, 100, [], 50, overruns)


def test_a_load_that_is_split_comes_back_in_order() -> None:
    arrivals = [ArrivingPrompt(float(at), [at]) for at in range(5)]
    parts = split_load(OfferedLoad([[1], [2], [3]], arrivals, 2.0, 4, 256, ""), 2)
    assert [part.streams for part in parts] == [[[1], [3]], [[2]]]
    runs = [loaded(*(one.at for one in part.arrivals), began=i) for i, part in enumerate(parts)]
    whole = joined_runs(runs)
    assert whole.first_tokens == [0, 1, 2, 3, 4] and whole.outputs == [[0], [1], [2], [3], [4]]
    assert (whole.began, whole.tokens, whole.forwards, len(whole.gaps)) == (0, 200, 100, 2)


def test_times_are_over_those_undisturbed_and_combined() -> None:
    handed = loaded(330.0, 440.0, gaps=(11.0, 12.0), began=5.0)
    handed.handovers.extend(
        [
            HandOverReport(transport="shm", outcome=WHOLE, seconds=0.3, queued=0.1, computing=0.19),
            HandOverReport(transport="shm", outcome="late", seconds=9.0),
        ]
    )
    rounds = {UNDISTURBED: [loaded()], combined(256): [loaded(300.0, 400.0, overruns=1)], ALL_HANDED: [handed]}
    forwards = [PacedForward(4.9, 2.0), PacedForward(5.0, 1.1), PacedForward(6.9, 0.4), PacedForward(7.0, 2.0)]
    rows = {row["layout"]: row for row in cell_rows(CELL, rounds, forwards)}
    own = rows[ALL_HANDED]
    assert own["over_undisturbed"] == pytest.approx(1.2) and own["p50_over_combined"] == pytest.approx(1.1)
    assert own["handed"] == 0.5 and own["exposed_ms"] == pytest.approx(10) and own["transport"] == "shm"
    assert own["equal_outputs"] == 0 and own["overruns"] == 0.5
    assert rows[combined(256)]["overruns"] == 0.02 and rows[UNDISTURBED]["prompts"] == 0
