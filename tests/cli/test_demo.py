"""The demo on a tiny pair."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pilotfish import pairs
from pilotfish.cli import compare, demo_run
from pilotfish.cli.demo_run import run_demo
from pilotfish.config import EngineConfig
from pilotfish.core.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0.8, max_tokens=6, seed=0)
Demo = Callable[[bool], bool]


@pytest.fixture
def demo(llama: Path, draft: Path) -> Demo:
    config = EngineConfig(target=llama, draft=draft, mode="sync", dtype="float32", threads=1, eager=True)
    return lambda json: run_demo("tiny", config, PARAMS, rounds=2, json=json)


def test_json_is_one_object(demo: Demo, capfd: pytest.CaptureFixture[str]) -> None:
    assert demo(True)
    (line,) = capfd.readouterr().out.splitlines()
    record = json.loads(line)
    assert record["matched"] == record["sequences"] == 2 * record["prompts"] == 6
    for mode in ("off", "sync"):
        figures = record[mode]
        assert len(figures["tokens_per_second_rounds"]) == 2
        assert sum(figures["time_share"].values()) == pytest.approx(1, abs=1e-6)
    assert record["off"]["tokens_per_verify_step"] == 1 <= record["sync"]["tokens_per_verify_step"]
    assert record["off"]["offered_by_depth"] == record["off"]["accepted_by_depth"] == []
    depths = zip(record["sync"]["accepted_by_depth"], record["sync"]["offered_by_depth"], strict=True)
    assert all(0 <= accepted <= offered for accepted, offered in depths)


def test_people_see_origins_and_a_table(demo: Demo, capfd: pytest.CaptureFixture[str]) -> None:
    assert demo(False)
    text = capfd.readouterr().out
    for word in ("guessed by the draft", "tokens per verify step", "accepted at depth 1", "6 of 6 outputs equal"):
        assert word in text
    assert "\x1b[" not in text


@pytest.mark.parametrize("colour", [True, False])
def test_the_streamed_text_is_the_output(llama: Path, draft: Path, colour: bool) -> None:
    engine = compare.Engine(
        EngineConfig(target=llama, draft=draft, mode="sync", dtype="float32", threads=1, eager=True)
    )
    prompt = demo_run.PROMPTS[0]
    pieces = "".join(piece.plain for piece in demo_run._pieces(engine, prompt, PARAMS, coloured=colour))
    (sample,) = engine.submit(prompt, PARAMS)
    while engine.busy:
        engine.step()
    if colour:
        assert sample.text.startswith(pieces) or pieces.startswith(sample.text)
    else:
        assert demo_run.OPENING in pieces


def test_no_round_begins_that_would_end_after_the_budget(llama: Path) -> None:
    engine = compare.Engine(EngineConfig(target=llama, dtype="float32", threads=1, eager=True))
    result = compare.compare(engine, ["a"], PARAMS, rounds=3, budget=0.0)
    assert len(result.off.passes) == len(result.sync.passes) == 1


def test_unequal_outputs_fail_in_float32_alone(
    demo: Demo, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare.Comparison, "matched", 5)
    assert not demo(True)
    assert json.loads(capfd.readouterr().out)["matched"] == 5


def test_the_command_passes_its_options_on(
    pilotfish, llama: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs, "resolve_pair", lambda _: pairs.PairDirs(llama, draft))
    options = ("--dtype", "float32", "--threads", 1, "--eager", "--max-tokens", 4, "--rounds", 1, "--json")
    result = pilotfish("demo", *options)
    assert result.code == 0 and result.rows[0]["max_tokens"] == 4 and result.rows[0]["pair"] == "pycode@344m"
    for option, value in (("--rounds", 0), ("--max-tokens", 0), ("--pair", "llama"), ("--temperature", -1)):
        if option != "--pair":
            assert pilotfish("demo", *options, option, value).code == 2
