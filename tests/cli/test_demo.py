"""The demo on a tiny pair."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from inline_drafts import inline_drafts

from pilotfish import pairs
from pilotfish.bench.contestants import Run
from pilotfish.cli import demo_pace, demo_scenes
from pilotfish.cli.demo_pace import measure, note_of, stretch_of, stretched
from pilotfish.cli.demo_scenes import Scene, record_of, run_demo, seeds_within
from pilotfish.config import EngineConfig
from pilotfish.core.budget import FixedBudget
from pilotfish.core.request import RequestStats
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.engine.remote_drafts import RemoteDrafts

PARAMS = SamplingParams(temperature=0.8, max_tokens=6, seed=0)
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


@pytest.fixture
def demo(config: EngineConfig) -> Demo:
    scenes = [
        Scene("paced", "tiny, paced", "tiny", replace(config, pace="target=1ms,draft=300us")),
        Scene("unpaced", "tiny, unpaced", "tiny", config),
    ]
    return lambda json: run_demo(scenes, PARAMS, rounds=2, json=json)


@pytest.mark.usefixtures("drafts")
def test_json_is_one_object_with_every_mode_of_both_scenes(demo: Demo, capfd: pytest.CaptureFixture[str]) -> None:
    assert demo(True)
    (line,) = capfd.readouterr().out.splitlines()
    record = json.loads(line)
    assert record["paced"]["pace"] == "target=1ms,draft=300us" and record["unpaced"]["pace"] == ""
    for scene in ("paced", "unpaced"):
        block = record[scene]
        assert block["sequences"] == 2 * record["prompts"] == 6 and block["matched"] == {"sync": 6, "async": 6}
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
    assert "\x1b[" not in text


@pytest.mark.usefixtures("drafts")
def test_every_engine_is_gone_before_the_next(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    cores, alive, modes = os.sched_getaffinity(0), set[Engine](), list[str]()
    enter, leave = Engine.__enter__, Engine.__exit__

    def entered(engine: Engine) -> Engine:
        assert not alive
        alive.add(engine)
        modes.append(engine.config.mode)
        if engine.config.mode == "sync":
            assert os.sched_getaffinity(0) == cores
        return enter(engine)

    def left(engine: Engine, *error: object) -> None:
        alive.remove(engine)
        leave(engine, *error)

    monkeypatch.setattr(Engine, "__enter__", entered)
    monkeypatch.setattr(Engine, "__exit__", left)
    scene = Scene("unpaced", "tiny", "tiny", config)
    assert run_demo([scene], PARAMS, rounds=1, json=True) and not alive and modes == ["async", "sync"]
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
    assert run_demo([Scene("unpaced", "tiny", "tiny", config)], PARAMS, rounds=1, json=True)
    assert json.loads(capfd.readouterr().out)["unpaced"]["matched"] == {"sync": 3, "async": 3}
    assert len(pids) == 1 and pids[0] not in (None, os.getpid())


@pytest.mark.parametrize("colour", [True, False])
def test_the_streamed_text_is_the_output(config: EngineConfig, colour: bool) -> None:
    engine = Engine(replace(config, mode="sync"))
    prompt = str(demo_scenes.PROMPTS[0].text)
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
    scene = Scene("unpaced", "tiny", "tiny", replace(config, dtype=dtype))
    off, other = ([a_round([token])] for token in (1, 2))
    for last, passed in ((other, dtype == "bfloat16"), (off, True)):
        runs = {"off": off, "sync": off, "async": last}
        record = record_of(runs, dict.fromkeys(runs, 1))
        monkeypatch.setattr(demo_scenes, "_run_scene", lambda *_, record=record, **__: (record, []))
        assert run_demo([scene], PARAMS, rounds=1, json=True) == passed


def test_the_command_fails_where_outputs_are_unequal(
    pilotfish, llama: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "resolve_pair", lambda _: pairs.PairDirs(llama, draft))
    monkeypatch.setattr(demo_scenes, "run_demo", lambda *_, **__: False)
    assert pilotfish("demo", "--pace", "target=1ms").code == 1


@pytest.mark.parametrize(
    ("target", "draft", "pace"),
    [
        ([10.4] * 500, [2.6] * 500, "target=10.4ms,draft=2.6ms"),
        ([10.5] * 500, [2.7] * 500, "target=10.4ms,draft=2.6ms"),  # woken late
        ([10.4] * 500, [4.0] * 500, "target=20.8ms,draft=5.2ms"),  # 4 / 2.6 times 1.25, rounded up
        ([30.0] * 500, [2.6] * 500, "target=38.48ms,draft=9.62ms"),
        ([10.4] * 500, [2.6] * 499 + [50.0], "target=10.4ms,draft=2.6ms"),  # one late level in 500 may be
        ([10.4] * 500, [2.6] * 490 + [4.0] * 10, "target=20.8ms,draft=5.2ms"),
        ([10.4] * 500, [], "target=10.4ms,draft=2.6ms"),
    ],
)
def test_the_pace_is_one_that_was_held(target: list[float], draft: list[float], pace: str) -> None:
    stretch = stretch_of(target, draft)
    assert stretched(stretch) == pace and (note_of(stretch) == "") == (stretch == 1)


def test_forwards_are_read_off_a_real_timeline(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_pace, "SECONDS", 0.5)
    target, levels = measure(config, PARAMS)
    assert len(target) >= len(demo_scenes.PROMPTS) and levels
    assert min(target) >= demo_pace.TARGET_MS and min(levels) >= demo_pace.DRAFT_MS  # they were held


@pytest.mark.usefixtures("drafts")
def test_the_command_takes_a_pace_that_the_machine_holds(
    pilotfish, llama: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "resolve_pair", lambda _: pairs.PairDirs(llama, draft))
    monkeypatch.setattr(demo_pace, "measure", lambda *_: ([10.4], [3.9]))
    shown: list[Scene] = []
    monkeypatch.setattr(demo_scenes, "run_demo", lambda scenes, *_, **__: shown.extend(scenes) or True)
    assert pilotfish("demo").code == 0
    assert [scene.config.pace for scene in shown] == ["target=19.76ms,draft=4.94ms", ""]
    assert "1.9 times slower" in shown[0].title


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
    assert result.code == 0 and result.rows[0]["max_tokens"] == 4
    scenes = [result.rows[0][name] for name in ("paced", "unpaced")]
    assert [(scene["pair"], scene["pace"]) for scene in scenes] == [("pycode", pace), ("pycode@344m", "")]
    for option, value in (("--rounds", 0), ("--max-tokens", 0), ("--temperature", -1), ("--pace", "")):
        assert pilotfish("demo", *options, option, value).code == 2
