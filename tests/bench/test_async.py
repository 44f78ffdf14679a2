"""Off, sync and async run side by side on a tiny pair with a draft worker of its own; no test says how fast."""

from dataclasses import replace

import pytest
from support import CONTEXT

from pilotfish.bench.asynchronous import (
    ASYNC,
    OFF,
    SyncSetting,
    num_sequences,
    periods_of,
    print_async,
    run_async,
)
from pilotfish.bench.cores import print_cores, run_cores
from pilotfish.bench.machine import Machine
from pilotfish.bench.workload import Prompt
from pilotfish.config import EngineConfig
from pilotfish.errors import InputError
from pilotfish.observe.records import StepRecord

MACHINE = Machine("none", 1, 1, "0", "0", 1.0, 1.0)


def record(before: float, ended: float, rows: int = 3, nodes: int = 2) -> StepRecord:
    """A step whose forward takes all its time but the last 0.25 s, of one sequence."""
    moments = (before, before, before, before, before, before, ended - 0.25, ended - 0.25, ended)
    counts = {"depth": 1, "offered": nodes, "accepted": 1, "committed": 2, "hits": 1}
    return StepRecord(*moments, sequences=1, rows=rows, nodes=nodes, **counts)


def test_periods_are_those_between_steps_without_prompt_rows() -> None:
    steps = [record(0, 1), record(1, 3), record(3, 4, rows=80), record(4, 9), record(9, 10)]
    periods = periods_of([steps, [record(0, 7)]])
    assert (periods.mean, periods.p50, periods.p99) == (1500, 2000, 2000)  # the second's and the last's
    assert periods.between == 250
    assert periods_of([[record(0, 1)]]).mean == 0


def test_a_sync_setting_is_levels_width_and_nodes() -> None:
    assert SyncSetting.parse("4x8:16") == SyncSetting(4, 8, 16)
    for text in ("", "4x8", "4:8:16", "0x1:1", "4x8:x", "4x8x2:1", "99x1:1"):
        with pytest.raises(InputError, match="sync"):
            SyncSetting.parse(text)


def test_all_modes_generate_the_same(
    config: EngineConfig, prompts: list[Prompt], capsys: pytest.CaptureFixture[str]
) -> None:
    paced = replace(config, mode="async", budget="fixed", pace="target=5ms,draft=1ms", cores="", max_requests=4)
    grid, done = [SyncSetting(2, 2, 4)], list[str]()
    report = run_async(paced, prompts, grid, [0.0], [1, 3], 12, 1, MACHINE, done.append)
    assert len(done) == num_sequences(len(prompts), len(grid), 1, [1, 3], 1)
    for result in report.results:
        speeds = {speed.contestant: speed for speed in result.speeds}
        assert list(speeds) == [OFF, "sync 2x2, 4 nodes", ASYNC] and result.best_sync == "sync 2x2, 4 nodes"
        assert all(speed.equal_outputs == 1 for speed in result.speeds)
        assert speeds[OFF].tokens_per_step == 1 and speeds[OFF].nodes == 0
        assert speeds["sync 2x2, 4 nodes"].tokens_per_step > 1  # the draft is the target, a little perturbed
        assert all(speed.periods.mean >= 5 for speed in result.speeds)  # no step is faster than its pace
        assert 0 < result.ceiling <= 200 * result.concurrency * CONTEXT
    print_async(report)
    assert "ceiling" in capsys.readouterr().out


def test_each_mode_has_an_engine_of_its_own(
    config: EngineConfig, prompts: list[Prompt], capsys: pytest.CaptureFixture[str]
) -> None:
    report = run_cores(replace(config, budget="fixed"), prompts, 0.8, 8, 1, MACHINE)
    assert [speed.contestant for speed in report.speeds] == ["off", "sync", "async"]
    assert all(speed.equal_outputs == 1 for speed in report.speeds)
    print_cores(report)
    assert "tokens/s" in capsys.readouterr().out
