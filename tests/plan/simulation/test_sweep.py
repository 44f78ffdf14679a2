"""Modes at several loads, where each stops paying, what a command line may say of them; costs of a machine."""

import gzip
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pilotfish.config.hardware.cost import ForwardLoad
from pilotfish.config.hardware.tables import PILOTFISH
from pilotfish.errors import ParameterError
from pilotfish.plan.simulation.acceptance import (
    BUNDLED,
    AcceptanceTrace,
    TracedPair,
    TracedSequence,
    drawn_acceptance,
    read_acceptance,
    trace_of,
    write_acceptance,
)
from pilotfish.plan.simulation.calibration import MachineCalibration, fitted, host_of, read_calibration
from pilotfish.plan.simulation.models import cost_of
from pilotfish.plan.simulation.setup import HostCosts, Setup, poisson_load
from pilotfish.plan.simulation.sweep import Sweep, SweepPoint, crossover

TRACE = drawn_acceptance(0.7, sequences=8, prompt=16, output=64)
#: A target that takes in proportion to its rows what it takes beyond a few.
SWEEP = Sweep(
    setup=Setup(target=lambda load: 0.010 * max(1.0, load.rows / 16), draft=lambda _: 0.001),
    trace=TRACE,
    modes=["sync"],
    loads=[1, 8, 32],
    requests=24,
    output=16,
)


@pytest.fixture(scope="module")
def points() -> list[SweepPoint]:
    done: list[None] = []
    found = list(SWEEP.points(lambda: done.append(None)))
    assert len(done) == len(found) == SWEEP.runs
    return found


def test_each_setting_is_held_against_the_others_of_its_load(points: list[SweepPoint]) -> None:
    for load in (1, 8, 32):
        off, fixed, auto = (point for point in points if point.load == load)
        assert (off.speedup, off.over_better, off.draft_busy, off.tokens_per_step) == (1, None, None, 1)
        assert fixed.over_better is None
        assert auto.speedup == pytest.approx(auto.tokens_per_second / off.tokens_per_second)
        better = max(off.tokens_per_second, fixed.tokens_per_second)
        assert auto.over_better == pytest.approx(auto.tokens_per_second / better)


def test_a_setting_stops_paying_between_two_loads(points: list[SweepPoint]) -> None:
    """Interpolated in log load: halfway lies the geometric mean."""
    fixed = [point for point in points if point.setting == "sync, fixed"]
    assert fixed[0].speedup > 1 > fixed[-1].speedup
    assert 1 < (crossover(fixed) or 0) < 32
    assert crossover(fixed[:1]) is None
    assert crossover([replace(fixed[-1], load=5)]) == 5
    around = [replace(points[0], load=load, speedup=speedup) for load, speedup in ((4, 1.2), (16, 0.8))]
    assert crossover(around) == pytest.approx(8)


def test_a_user_gains_where_requests_come_whatever_has_ended() -> None:
    off, fixed, _ = replace(SWEEP, poisson=True, loads=[2.0], requests=12).points(lambda: None)
    assert fixed.speedup == pytest.approx(fixed.user_tokens_per_second / off.user_tokens_per_second)
    assert fixed.speedup > fixed.tokens_per_second / off.tokens_per_second


def test_requests_come_by_chance_at_their_rate() -> None:
    items = poisson_load(4000, 8.0, 10, 3).items
    assert items[-1].at == pytest.approx(500, rel=0.05)
    assert [item.sequence for item in items[:4]] == [0, 1, 2, 0]


def test_costs_are_paces_or_devices() -> None:
    for text, seconds in (("10.4ms", 0.0104), ("1:10ms/64:20ms", 0.010), ("llama-3.2-1b@h200", 0.0012)):
        assert cost_of("target", text)(ForwardLoad(rows=1)) == pytest.approx(seconds, rel=0.2)


def test_the_bundled_pairs_trace_is_there() -> None:
    trace = trace_of("pycode", None)
    assert trace.pair.target == "pycode/target" and len(trace.tokens) == 24 * 128
    assert trace.acceptance == pytest.approx(0.641, abs=0.001)
    assert BUNDLED["pycode"].stat().st_size < 200_000


def test_a_trace_may_be_drawn_instead() -> None:
    assert trace_of("pycode", 0.8).acceptance == pytest.approx(0.8, abs=0.05)
    for bad in (0.0, 1.0, float("nan")):
        with pytest.raises(ParameterError, match="acceptance"):
            trace_of("pycode", bad)


def test_the_host_is_that_of_a_machine_or_assumed(tmp_path: Path) -> None:
    level = PILOTFISH.level.value
    assert host_of(None) == HostCosts(step=PILOTFISH.step.value, level=level, waited=level)
    own = {"processor": "a", "pair": "pycode", "target": "1:1ms/8:2ms", "draft": "1ms"}
    calibration = MachineCalibration(**own, host=HostCosts(step=0.001))
    file, other, garbage = (tmp_path / f"{name}.json" for name in ("machine", "other", "garbage"))
    file.write_bytes(msgspec.json.encode(calibration))
    assert read_calibration(file) == calibration and host_of(file) == HostCosts(step=0.001)
    other.write_bytes(file.read_bytes().replace(b"step", b"stop"))
    garbage.write_bytes(b'{"processor": "\xff"}')
    for wrong in (other, garbage, tmp_path / "missing.json"):
        with pytest.raises(ParameterError, match=r"machine: .*plan calibrate"):
            host_of(wrong)


# -- costs of a machine, fitted to what was seen


COSTS = st.lists(st.floats(0.001, 1.0), min_size=3, max_size=3)


@given(COSTS)
def test_costs_are_found_again(costs: list[float]) -> None:
    counts = [[1, sequences, nodes] for sequences in (1, 2, 4) for nodes in (0, 8, 30)]
    seconds = (np.array(counts) @ np.array(costs)).tolist()
    assert fitted(counts, seconds) == pytest.approx(costs, rel=1e-6)


def test_stragglers_do_not_count_and_no_cost_is_negative() -> None:
    counts = [[1, rows] for rows in (1, 5) for _ in range(9)]
    assert fitted(counts, [*[2.0] * 8, 90.0, *[1.0] * 8, 70.0]) == pytest.approx([1.5, 0.0])


# -- acceptance traces: files of them, and drawn ones


PAIR = TracedPair("target", "draft", 0.8, 100)
SEQUENCES = [
    TracedSequence("a", [1, 2], [3, 4], [[3, 5], [6, 4]], [[-0.1, -2.5], [-0.7, -0.7]]),
    TracedSequence("b", [7], [8], [[9, 5]], [[-0.25, -1.5]]),
]


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_file_gives_back_what_was_written(tmp_path: Path, name: str) -> None:
    write_acceptance(tmp_path / name, PAIR, SEQUENCES)
    read, written = read_acceptance(tmp_path / name), AcceptanceTrace.of(PAIR, SEQUENCES)
    assert (read.pair, list(read.prompts)) == (PAIR, [[1, 2], [7]])
    for field in ("first", "tokens", "guesses", "log_chances"):
        assert np.array_equal(getattr(read, field), getattr(written, field))
    assert read.ranks.tolist() == [0, 1, 2]
    assert read.acceptance == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"id": "b", "prompt": [7]}', "trace.jsonl:3.*`tokens`"),
        (b'{"id": "b", "prompt": [7], "tokens": [8], "guesses": [[9]], "log_chances": [[0.5]]}', "trace.jsonl:3.*<= 0"),
        (b'{"id": "b", "prompt": [7], "tokens": [8], "guesses": [[9]], "log_chances": [[-1]]}', "'b' is not.*as many"),
        (b"{", "trace.jsonl:3"),
        (b'{"id": "\xff"}', "trace.jsonl:3"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "trace.jsonl"
    write_acceptance(path, PAIR, SEQUENCES[:1])
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(ParameterError, match=reason):
        read_acceptance(path)


def test_a_file_that_is_cut_off_or_not_there_is_refused(tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(gzip.compress(b"x" * 1000)[:-8])
    garbage = tmp_path / "garbage.jsonl.gz"
    garbage.write_bytes(gzip.compress(b"x" * 1000)[:10] + b"\xff" * 20)
    for path in (cut, garbage, tmp_path / "missing.jsonl"):
        with pytest.raises(ParameterError, match="a readable file"):
            read_acceptance(path)


@settings(max_examples=10)
@given(st.floats(0.05, 0.95))
def test_drawn_guesses_are_right_as_often_as_they_say(acceptance: float) -> None:
    trace = drawn_acceptance(acceptance, sequences=8, output=1024)
    first, chances = trace.guesses[:, 0] == trace.tokens, np.exp(trace.log_chances[:, 0])
    assert abs(first.mean() - chances.mean()) < 0.03
    assert np.all(np.diff(trace.log_chances, axis=1) <= 0)
    assert all(len(set(row)) == trace.width for row in trace.guesses[:64].tolist())
