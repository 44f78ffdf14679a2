"""Acceptance, profile, quantization and memory on tiny models; no test says how fast."""

import json
from itertools import product
from operator import eq
from pathlib import Path

import pytest
import torch
from conftest import Invoke, Measure
from support import limits, paths_of, proposed
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from pilotfish.bench import app
from pilotfish.bench.acceptance import run_acceptance
from pilotfish.bench.contestants import OFF, drafting, take_turns
from pilotfish.bench.forwards import (
    CHUNK,
    PARTS,
    PROFILE_ROWS,
    QUANTIZATIONS,
    compare_models,
    run_memory,
    run_profile,
    run_quantization,
    score,
)
from pilotfish.bench.parity import RandomDrafter
from pilotfish.bench.workload import Prompt, jobs_at
from pilotfish.config.engine import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.errors import EngineError, InputError


def test_everybody_plays_every_round_and_goes_first_in_turn() -> None:
    played: list[str] = []
    contestants = {name: lambda work, name=name: played.append(f"{name}{work}") or 10 * work for name in "ab"}
    assert take_turns(contestants, [1, 2, 3]) == {"a": [20, 30], "b": [20, 30]}
    assert played == ["a1", "b1", "b2", "a2", "a3", "b3"]


def test_acceptance(measure: Measure) -> None:
    results = measure(run_acceptance, "acceptance", max_tokens=12, threads=1, levels=3).results["results"]
    assert [(row["drafter"], row["temperature"]) for row in results] == [
        (drafter, temperature) for temperature in (0.0, 0.8) for drafter in ("lm", "lm+ngram", "ngram")
    ]
    for row in results:
        assert row["tokens"] == 12 * 2
        assert 1 <= row["tokens_per_verify_step"] <= 12 and 0 < row["distinct_4grams"] <= 1
        assert row["accepted_by_origin"].keys() <= set(row["drafter"].split("+"))
        assert sum(row["accepted_by_origin"].values()) == row["tokens"] - row["verify_steps"]
        depths = row["acceptance_by_depth"]
        assert depths == sorted(depths, reverse=True) or row["drafter"] != "lm"
    assert results[0]["tokens_per_verify_step"] > 1  # the fixture's draft is often right


def test_profile(measure: Measure) -> None:
    results = measure(run_profile, "profile", limit=1, max_tokens=6, repeats=1, threads=1).results
    assert tuple(results["forward_ms"]) == PROFILE_ROWS
    for row in results["steps"]:
        assert 0 < row["runtime_share"] < 1 and all(row[part] >= 0 for part in (*PARTS, "text"))
        assert row["ms"] == pytest.approx(sum(row[part] for part in (*PARTS, "text")))
    assert next(row for row in results["steps"] if row["drafter"] == OFF)["steps"] == 6


def test_quantization(measure: Measure) -> None:
    results = measure(run_quantization, "quantization", max_tokens=12, repeats=1, threads=1).results
    models = results["models"]
    assert [(row["model"], row["quantization"]) for row in models] == list(product(("target", "draft"), QUANTIZATIONS))
    for plain, int8 in (models[:2], models[2:]):
        assert plain["agreement"] == 1 >= int8["agreement"] > 0.5
        assert plain["loss"] != int8["loss"] == pytest.approx(plain["loss"], abs=0.3)
        assert all(ms > 0 for row in (plain, int8) for ms in row["forward_ms"].values())
    plain_outputs = [row["equal_outputs"] for row in results["pairs"] if row["target"] == "none"]
    assert plain_outputs == [1.0] * 4  # a draft changes nothing, whatever its weights
    for temperature in (0.0, 0.8):
        int8 = [row for row in results["pairs"] if (row["target"], row["temperature"]) == ("int8", temperature)]
        assert len({row["equal_outputs"] for row in int8}) == 1
    assert all(1 <= row["tokens_per_verify_step"] <= 12 for row in results["pairs"])


def test_memory(measure: Measure) -> None:
    """The deviation means something in a fresh process only; here that all is filled and counted."""
    results = measure(run_memory, "memory", kv_slots=256, max_requests=4).results
    assert results["requests"] == 4 and 0 < results["loaded"] <= results["peak"]
    assert results["deviation"] == results["peak"] / results["total"] - 1
    assert "256 KV slots" in [row["part"] for row in results["plan"]]


def test_more_sequences_than_a_step_has_rows(llama: Path, draft: Path) -> None:
    """Each running sequence needs a row: the others wait."""
    with Engine(EngineConfig(target=llama, draft=draft, mode="sync", drafter="lm", max_rows=4)) as engine:
        jobs = jobs_at([Prompt("a", "def f(")] * 6, 0.0, 5)
        assert [len(output) for output in drafting(engine, OFF).run(engine, jobs, 6).outputs] == [5] * 6


def test_scores_are_those_of_the_text_at_once(config: EngineConfig) -> None:
    """Chunks of a chain of nodes, against one forward of transformers."""
    tokens = list(range(1, 2 * CHUNK + 3))
    executor = Engine(config).executor
    reference = AutoModelForCausalLM.from_pretrained(config.target, dtype=torch.float32)
    with torch.inference_mode():
        logits = reference(torch.tensor([tokens])).logits[0, :-1]
    exact = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")
    for length in (2, CHUNK, CHUNK + 1, CHUNK + 2, len(tokens)):
        losses, likeliest = score(executor, [tokens[:length]])
        torch.testing.assert_close(losses, exact[: length - 1], rtol=0, atol=1e-4)
        assert torch.equal(likeliest, logits[: length - 1].argmax(dim=-1))


def test_agreement_is_with_plain_weights(config: EngineConfig) -> None:
    """Shown on weights that differ more than int8 does: the draft in place of the quantized target."""
    engine, texts = Engine(config), [list(range(1, 60)), [7, 8, 9]]
    target, draft = engine.executor, engine.drafters.draft_executor
    plain, other = compare_models({"none": target, "int8": draft}, texts, 1)
    likeliest = [score(executor, texts)[1].tolist() for executor in (target, draft)]
    assert len(likeliest[0]) == 60
    assert plain["agreement"] == 1 > other["agreement"]
    assert other["agreement"] == pytest.approx(sum(map(eq, *likeliest)) / 60)


def test_drafters_are_swapped_only_when_idle(config: EngineConfig, prompts: list[Prompt]) -> None:
    engine = Engine(config)
    [job] = jobs_at(prompts[:1], 0.0, 4)
    engine.submit(job.prompt.text, job.params)
    with pytest.raises(EngineError, match="swapped"):
        drafting(engine, "off").run(engine, [job], 1)


def test_random_trees_repeat_and_stay_in_the_vocabulary(config: EngineConfig, prompts: list[Prompt]) -> None:
    engine = Engine(config)
    [job] = jobs_at(prompts[:1], 0.8, 4)
    [sample] = engine.submit(job.prompt.text, job.params)
    trees = [proposed(RandomDrafter(9), [sample.request], limits())[0] for _ in range(2)]
    assert paths_of(trees[0]) == paths_of(trees[1])
    assert set(trees[0].tokens.tolist()) <= set(range(9)) | set(sample.request.tokens)


def test_commands(invoke: Invoke, tmp_path: Path) -> None:
    out = tmp_path / "acceptance.json"
    options = ("--limit", "1", "--max-tokens", "8", "--threads", "1", "--quantization", "int8", "--out", str(out))
    report = invoke("acceptance", *options)
    assert report == json.loads(out.read_text())
    assert (report["quantization"], report["prompts"], report["max_tokens"]) == (
        "int8",
        1,
        8,
    ) and "machine" not in report


@pytest.mark.parametrize("arguments", [["--shard", "2/1"], ["--threads", "0"], ["--dtype", "int8"], ["--mode", "off"]])
def test_bad_usage(llama: Path, draft: Path, prompt_file: Path, arguments: list[str]) -> None:
    models = ["--target", str(llama), "--draft", str(draft), "--prompts", str(prompt_file)]
    result = CliRunner().invoke(app, ["parity", *models, *arguments])
    assert isinstance(result.exception, InputError)
