"""The demo on a tiny pair."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from inline_drafts import inline_drafts
from support import CONTEXT, step_until

from pilotfish.cli.bench.contestants import Run
from pilotfish.cli.demo import demo_pace, demo_runs, demo_scenes
from pilotfish.cli.demo.demo_pace import measured_scene, paced_scene, slower_scene, stretch_of, stretched
from pilotfish.cli.demo.demo_runs import PROMPTS, Scene, Timing, Work, seeds_within, time_modes
from pilotfish.cli.demo.demo_scenes import run_demo
from pilotfish.cli.demo.demo_tables import record_of, verdict
from pilotfish.config.engine import EngineConfig
from pilotfish.config.hardware.pace import Pace
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.budget import FixedBudget
from pilotfish.core.scheduling.request import RequestStats
from pilotfish.engine import pairs
from pilotfish.engine.drafts.remote_drafts import RemoteDrafts
from pilotfish.engine.engine import Engine
from pilotfish.model.pacer import Pacer

PARAMS = SamplingParams(temperature=0.8, max_tokens=6, seed=0)
WORK = Work(PARAMS)
PACE = Pace.parse("1ms")
Demo = Callable[[bool], bool]


@pytest.fixture
def config(llama: Path, draft: Path) -> EngineConfig:
    return EngineConfig(
        target=llama, draft=draft, mode="async", budget="fixed", dtype="float32", threads=1, kv_slots=4096, eager=True
    )


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with inline_drafts(monkeypatch):
        yield


@pytest.fixture(autouse=True)
def _time_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, no round is left out and no output shortened."""
    monkeypatch.setattr(demo_runs, "SECONDS", 1e6)
    monkeypatch.setattr(demo_scenes, "SECONDS", 1e6)
    monkeypatch.setattr(demo_scenes, "ASYNC_SECONDS", 1e6)


@pytest.fixture
def demo(config: EngineConfig) -> Demo:
    scenes = [
        Scene("paced", "tiny, paced", "tiny", replace(config, pace="target=1ms,draft=300us")),
        Scene("unpaced", "tiny, unpaced", "tiny", config),
    ]
    return lambda json: run_demo(scenes, WORK, rounds=2, json=json, began=time.perf_counter())


@pytest.mark.usefixtures("drafts")
def test_json_is_one_object_with_every_mode_of_both_scenes(demo: Demo, capfd: pytest.CaptureFixture[str]) -> None:
    assert demo(True)
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


@pytest.mark.usefixtures("drafts")
def test_people_see_origins_and_tables(demo: Demo, capfd: pytest.CaptureFixture[str]) -> None:
    assert demo(False)
    text = capfd.readouterr().out
    assert text.count("guessed by the draft") == 1
    words = ("tiny, paced", "tiny, unpaced", "tokens per verify step", "accepted at depth 1")
    assert [text.count(word) for word in words] == [1, 1, 2, 2]
    assert text.count("accepted, guessed by draft 0") == 2
    assert text.count("12 of 12 outputs equal") == 2 and text.count("paced: async target 1ms") == 1
    assert text.count("async is ") + text.count("no verdict: ") == 2 and text.count("the demo took ") == 1
    assert "\x1b[" not in text


@pytest.mark.usefixtures("drafts")
def test_every_engine_is_gone_before_the_next(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
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

    monkeypatch.setattr(demo_runs, "Engine", Watched)
    scene = Scene("unpaced", "tiny", "tiny", config)
    assert run_demo([scene], WORK, rounds=1, json=True, began=0.0) and not alive and modes == ["async", "sync"]
    assert os.sched_getaffinity(0) == cores


def test_a_draft_in_a_process_of_its_own(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pids: list[int | None] = []
    close = RemoteDrafts.close

    def closed(drafts: RemoteDrafts) -> None:
        pids.extend(state.pid for state in drafts.workers() if state.status == "running")
        close(drafts)

    monkeypatch.setattr(RemoteDrafts, "close", closed)
    assert run_demo([Scene("unpaced", "tiny", "tiny", config)], WORK, rounds=1, json=True, began=0.0)
    assert json.loads(capfd.readouterr().out)["unpaced"]["matched"] == {"sync": 3, "async": 3}
    assert len(pids) == 1 and pids[0] not in (None, os.getpid())


@pytest.mark.parametrize("colour", [True, False])
def test_the_streamed_text_is_the_output(config: EngineConfig, colour: bool) -> None:
    engine = Engine(replace(config, mode="sync"))
    prompt = str(PROMPTS[0].text)
    pieces = "".join(piece.plain for piece in demo_scenes._pieces(engine, prompt, PARAMS, coloured=colour))
    (sample,) = engine.submit(prompt, PARAMS)
    while engine.busy:
        engine.step()
    assert sample.request.stats.accepted_tokens
    if colour:
        assert sample.text.startswith(pieces) or pieces.startswith(sample.text)
    else:
        assert demo_scenes.OPENING in pieces


def test_no_round_begins_that_would_end_after_the_budget() -> None:
    assert list(seeds_within(3, seconds=0.0)) == [0]
    assert list(seeds_within(3, seconds=1e9)) == [0, 1, 2]


def a_round(*outputs: list[int]) -> Run:
    return Run(1.0, list(outputs), [RequestStats(verify_steps=1) for _ in outputs])


def test_modes_are_compared_over_the_rounds_that_all_have_run() -> None:
    off = [a_round([1, 2], [3]), a_round([4], [5])]
    record = record_of({"async": [a_round([1, 2], [9])], "off": off, "sync": off}, {"off": 2, "sync": 2, "async": 1})
    assert list(record) == ["off", "sync", "async", "speedup", "sequences", "matched"]
    assert record["sequences"] == 2 and record["matched"] == {"sync": 2, "async": 1}
    assert [record[mode]["target_cores"] for mode in ("off", "sync", "async")] == [2, 2, 1]
    assert all(len(record[mode]["tokens_per_second_rounds"]) == 1 for mode in ("off", "sync", "async"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_unequal_outputs_fail_in_float32_alone(
    config: EngineConfig, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene("unpaced", "tiny", "tiny", config)
    off, other = ([a_round([token])] for token in (1, 2))
    for last, passed in ((other, dtype == "bfloat16"), (off, True)):
        runs = {"off": off, "sync": off, "async": last}
        record = {"dtype": dtype, **record_of(runs, dict.fromkeys(runs, 1))}
        monkeypatch.setattr(demo_scenes, "_compare", lambda *_, record=record, **__: (scene, record, []))
        assert run_demo([scene], WORK, rounds=1, json=True, began=0.0) == passed


@pytest.mark.parametrize(
    ("speeds", "cores", "valid", "words"),
    [
        ((2.0, 3.0), (2, 1), True, "async is ahead: 1.50 times as fast as sync"),
        ((2.0, 2.0), (2, 1), True, "async is ahead: 1.00 times"),
        (
            (2.0, 1.0),
            (2, 1),
            True,
            "async is behind: 0.50 times as fast as sync: it leaves its target 1 of the 2 cores",
        ),
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
    work = Work(replace(PARAMS, max_tokens=64)).within(tokens)
    assert (work.prompts, work.params.max_tokens) == (prompts, each)
    assert [job.prompt for job in work.jobs(seed=5)] == PROMPTS[:prompts]
    assert all(job.params == replace(PARAMS, max_tokens=each, seed=5) for job in work.jobs(seed=5))


@pytest.mark.usefixtures("drafts")
def test_a_slow_target_has_less_to_do_in_every_mode(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_runs, "SECONDS", 0.2)
    work = Work(replace(PARAMS, max_tokens=64))
    own = time_modes(replace(config, pace="target=20ms"), work, 1, seconds=1.0, quiet=True)
    assert own.work.prompts == 1 and 1 <= own.work.params.max_tokens <= 8
    assert own.pacing[0].role == "async target" and own.pacing[0].forwards > 0
    others = time_modes(replace(config, mode="sync"), own.work, 1, seconds=1.0, quiet=True)
    assert others.work == own.work and others.runs["off"][0].outputs == own.runs["async"][0].outputs


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
    assert stretched(stretch) == scene.config.pace == pace and pace in scene.title
    assert ("slower" in scene.title) == (stretch > 1)


@pytest.mark.parametrize(("taken", "stretch"), [(1.5, 3.6), (0.9, 2.4)])
def test_a_pace_that_was_not_held_is_stretched_by_what_it_lacked(
    config: EngineConfig, taken: float, stretch: float
) -> None:
    """By a margin at least: some forwards were late."""
    assert slower_scene(paced_scene("tiny", config, 2.0), [pacer(*[taken] * 500)]).stretch == stretch


def test_a_workers_levels_are_read_off_a_real_timeline(config: EngineConfig, tmp_path: Path) -> None:
    paced = replace(config, pace="target=20ms,draft=1us", trace=tmp_path / "timeline.json")
    with Engine(paced) as engine:
        step_until(engine, engine.submit(PROMPTS[0].text, replace(PARAMS, max_tokens=CONTEXT // 2)), "draft 0")
    (draft,) = demo_runs._worker_pacing(tmp_path / "timeline.json", paced, began=0.0)
    assert draft.role == "async draft 0" and draft.forwards == draft.overruns == len(draft.taken) > 0
    assert min(draft.taken) > 1 and not draft.valid
    (late,) = demo_runs._worker_pacing(tmp_path / "timeline.json", paced, began=time.perf_counter() + 1e6)
    assert late.role == "async draft 0" and not late.forwards


@pytest.mark.usefixtures("drafts")
def test_a_trial_decides_the_pace(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_pace, "SECONDS", 0.1)
    monkeypatch.setattr(demo_pace, "stretch_of", lambda pacing: 3.0 if pacing[0].forwards else 1.0)
    scene = measured_scene("tiny", config, WORK, quiet=True)
    assert (scene.name, scene.stretch, scene.config.pace) == ("paced", 3.0, stretched(3.0))


def timing(*, late: int) -> Timing:
    return Timing(WORK, {"async": [a_round([1])]}, {"async": 1}, [pacer(*[0.5] * 90, *[1.5] * late)], 0, "float32")


@pytest.mark.parametrize(("outcomes", "stretches"), [([0], [2.0]), ([9, 0], [2.0, 3.6]), ([9, 9, 9], [2.0, 3.6, 6.5])])
def test_a_pace_that_is_not_held_after_all_is_tried_again_slower(
    config: EngineConfig, outcomes: list[int], stretches: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, left = list[str](), iter(outcomes)
    monkeypatch.setattr(
        demo_scenes, "time_modes", lambda config, *_, **__: (ran.append(config.pace), timing(late=next(left)))[1]
    )
    scene, last = demo_scenes._time_async(paced_scene("tiny", config, 2.0), WORK, 1, None, quiet=True)
    assert ran == [stretched(stretch) for stretch in stretches] and scene.config.pace == ran[-1]
    assert last.valid == (outcomes[-1] == 0)


def test_a_given_pace_is_not_tried_again(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_scenes, "time_modes", lambda *_, **__: timing(late=9))
    given = Scene("paced", "", "tiny", replace(config, pace="target=1ms"))
    assert demo_scenes._time_async(given, WORK, 1, None, quiet=True)[0] == given


# -- the command


def test_the_command_fails_where_outputs_are_unequal(
    pilotfish, llama: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "resolve_pair", lambda _: pairs.PairDirs(llama, draft))
    monkeypatch.setattr(demo_scenes, "run_demo", lambda *_, **__: False)
    assert pilotfish("demo", "--pace", "target=1ms").code == 1


def test_the_command_takes_a_pace_that_the_machine_holds(
    pilotfish, llama: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "resolve_pair", lambda _: pairs.PairDirs(llama, draft))
    monkeypatch.setattr(demo_pace, "time_modes", lambda *_, **__: timing(late=9))
    shown: list[Scene] = []
    monkeypatch.setattr(demo_scenes, "run_demo", lambda scenes, *_, **__: shown.extend(scenes) or True)
    assert pilotfish("demo").code == 0
    assert [scene.config.pace for scene in shown] == [stretched(1.8), ""]
    assert "1.8 times slower" in shown[0].title and [scene.stretch for scene in shown] == [1.8, None]


@pytest.mark.usefixtures("drafts")
def test_the_command_passes_its_options_on(
    pilotfish, llama: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "resolve_pair", lambda _: pairs.PairDirs(llama, draft))
    monkeypatch.setattr(
        "pilotfish.engine.engine.make_budget", lambda config, *_: FixedBudget(config.nodes, config.levels)
    )
    pace = "target=500us,draft=100us"
    options = ("--dtype", "float32", "--threads", 1, "--eager", "--max-tokens", 4, "--rounds", 1, "--json")
    result = pilotfish("demo", *options, "--pace", pace)
    assert result.code == 0
    scenes = [result.rows[0][name] for name in ("paced", "unpaced")]
    assert [(scene["pair"], scene["pace"]) for scene in scenes] == [("pycode", pace), ("pycode@344m", "")]
    assert [scene["max_tokens"] for scene in scenes] == [4, 4]
    for option, value in (("--rounds", 0), ("--max-tokens", 0), ("--temperature", -1), ("--pace", "")):
        assert pilotfish("demo", *options, option, value).code == 2
