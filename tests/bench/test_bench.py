"""Speed, acceptance and profile run on tiny models; no test says how fast."""

import json
from dataclasses import replace
from itertools import product
from operator import eq
from pathlib import Path

import pytest
import torch
from support import limits, paths_of
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from pilotfish.bench import app, machine
from pilotfish.bench.acceptance import run_acceptance
from pilotfish.bench.drafters import Bench, RandomDrafter
from pilotfish.bench.machine import Machine, cpu_name, describe_machine, matmul_probe, read_probe
from pilotfish.bench.memory import print_memory, run_memory
from pilotfish.bench.profile import ROWS, run_profile
from pilotfish.bench.quantization import (
    CHUNK,
    QUANTIZATIONS,
    compare_models,
    print_quantization,
    run_quantization,
    score,
)
from pilotfish.bench.quantization import num_sequences as quantized_sequences
from pilotfish.bench.speed import BEST, num_sequences, print_speed, run_speed
from pilotfish.bench.workload import Prompt, jobs_at
from pilotfish.config import EngineConfig, Quantization
from pilotfish.errors import EngineError, InputError

MACHINE = Machine("none", 1, 1, "0", "0", 1.0, 1.0)


def test_speed(config: EngineConfig, prompts: list[Prompt], capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []
    report = run_speed(config, prompts, 6, 1, MACHINE, done.append)
    assert len(done) == num_sequences(len(prompts), 1)
    greedy = {speed.contestant for speed in report.speeds if speed.temperature == 0}
    sampled = {speed.contestant for speed in report.speeds if speed.temperature == 0.8}
    assert greedy - sampled == {"transformers prompt lookup"} and len(greedy) == 7
    assert all(speed.tokens_per_second.count == len(prompts) for speed in report.speeds)
    steps = {speed.contestant: speed.tokens_per_verify_step for speed in report.speeds}
    assert steps["off"] == 1 and steps["transformers"] is None
    assert {ratio.denominator for ratio in report.ratios} >= {"off", "transformers", BEST}
    print_speed(report)
    assert "ratios" in capsys.readouterr().out


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_contestants_agree_on_what_is_generated(
    config: EngineConfig, prompts: list[Prompt], quantization: Quantization
) -> None:
    """Greedy outputs of ours and of transformers are the same work, not only the same length."""
    from pilotfish.bench.speed import load_contestants

    bench, contestants = load_contestants(replace(config, quantization=quantization))
    ids = bench.engine.check_prompt(prompts[0].text)
    outputs = {c.name: c.run(ids, 0.0, 1, 6).tokens for c in contestants}
    assert len(set(map(tuple, outputs.values()))) == 1


def test_acceptance(config: EngineConfig, prompts: list[Prompt]) -> None:
    report = run_acceptance(config, prompts, 12)
    assert [(r.drafter, r.temperature) for r in report.results] == [
        (drafter, temperature) for temperature in (0.0, 0.8) for drafter in ("lm", "lm+ngram", "ngram")
    ]
    for result in report.results:
        assert result.tokens == 12 * len(prompts)
        assert 1 <= result.tokens_per_verify_step <= 12 and 0 < result.distinct_4grams <= 1
        assert result.accepted_by_origin.keys() <= set(result.drafter.split("+"))
        assert sum(result.accepted_by_origin.values()) == result.tokens - result.verify_steps
        assert result.acceptance_by_depth == sorted(result.acceptance_by_depth, reverse=True) or result.drafter != "lm"
    assert report.results[0].tokens_per_verify_step > 1  # the fixture's draft is often right


def test_profile(config: EngineConfig, prompts: list[Prompt]) -> None:
    report = run_profile(config, prompts[:1], 6, 1, MACHINE)
    assert tuple(report.forward_ms) == ROWS
    for step in report.steps:
        assert set(step.milliseconds) == {"draft", "schedule", "rows", "forward", "verify", "commit", "text"}
        assert 0 < step.runtime_share < 1 and all(ms >= 0 for ms in step.milliseconds.values())
    assert next(step for step in report.steps if step.drafter == "off").steps == 6


def test_quantization(config: EngineConfig, prompts: list[Prompt], capsys: pytest.CaptureFixture[str]) -> None:
    done: list[str] = []
    report = run_quantization(config, prompts, 12, 1, MACHINE, done.append)
    assert len(done) == quantized_sequences(len(prompts))
    assert [(r.model, r.quantization) for r in report.models] == list(product(("target", "draft"), QUANTIZATIONS))
    for plain, int8 in (report.models[:2], report.models[2:]):
        assert plain.agreement == 1 >= int8.agreement > 0.5
        assert plain.loss != int8.loss == pytest.approx(plain.loss, abs=0.3)
        assert all(ms > 0 for result in (plain, int8) for ms in result.forward_ms.values())
    plain_outputs = [r.equal_outputs for r in report.pairs if r.target == "none"]
    assert plain_outputs == [1.0] * 4  # a draft changes nothing, whatever its weights
    for temperature in (0.0, 0.8):
        int8_outputs = {r.equal_outputs for r in report.pairs if (r.target, r.temperature) == ("int8", temperature)}
        assert len(int8_outputs) == 1
    assert all(1 <= r.tokens_per_verify_step <= 12 for r in report.pairs)
    print_quantization(report)
    assert "int8" in capsys.readouterr().out


def test_memory(config: EngineConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """The deviation means something in a fresh process only; here that all is filled, counted and printed."""
    done: list[str] = []
    report = run_memory(replace(config, kv_slots=256, max_requests=4), done.append)
    assert len(done) == report.requests == 4
    assert report.plan.slots == 256 and report.total == report.plan.total
    assert 0 < report.loaded <= report.peak
    assert report.deviation == report.peak / report.total - 1
    print_memory(report)
    assert "256 KV slots" in capsys.readouterr().out


def test_scores_are_those_of_the_text_at_once(config: EngineConfig) -> None:
    """Chunks of a chain of nodes, against one forward of transformers."""
    tokens = list(range(1, 2 * CHUNK + 3))
    runner = Bench(config).engine.runner
    reference = AutoModelForCausalLM.from_pretrained(config.target, dtype=torch.float32)
    with torch.inference_mode():
        logits = reference(torch.tensor([tokens])).logits[0, :-1]
    exact = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]), reduction="none")
    for length in (2, CHUNK, CHUNK + 1, CHUNK + 2, len(tokens)):
        scores = score(runner, [tokens[:length]])
        torch.testing.assert_close(scores.losses, exact[: length - 1], rtol=0, atol=1e-4)
        assert torch.equal(scores.likeliest, logits[: length - 1].argmax(dim=-1))


def test_agreement_is_with_plain_weights(config: EngineConfig) -> None:
    """Shown on weights that differ more than int8 does: the draft in place of the quantized target."""
    bench, texts = Bench(config), [list(range(1, 60)), [7, 8, 9]]
    target, draft = bench.engine.runner, bench.draft_runner
    plain, other = compare_models("target", {"none": target, "int8": draft}, texts, 1)
    likeliest = [score(runner, texts).likeliest.tolist() for runner in (target, draft)]
    assert len(likeliest[0]) == 60
    assert plain.agreement == 1 > other.agreement
    assert other.agreement == pytest.approx(sum(map(eq, *likeliest)) / 60)


def test_drafters_are_swapped_only_when_idle(config: EngineConfig, prompts: list[Prompt]) -> None:
    bench = Bench(config)
    [job] = jobs_at(prompts[:1], 0.0, 4)
    bench.engine.submit(job.prompt.text, job.params)
    with pytest.raises(EngineError, match="swapped"):
        bench.run(bench.drafter("off"), [job], 1)


def test_random_trees_repeat_and_stay_in_the_vocabulary(config: EngineConfig, prompts: list[Prompt]) -> None:
    bench = Bench(config)
    jobs = jobs_at(prompts[:1], 0.8, 4)
    [sample] = bench.run(bench.drafter("off"), jobs, 1)
    trees = [RandomDrafter(9, 20).propose([sample.request], limits())[0] for _ in range(2)]
    assert paths_of(trees[0]) == paths_of(trees[1])
    assert set(trees[0].tokens.tolist()) <= set(range(9)) | set(sample.request.tokens)


def test_the_machine_is_described(tmp_path: Path) -> None:
    machine = describe_machine("float32")
    assert machine.cpu and machine.threads == torch.get_num_threads() and machine.matmul_dtype == "float32"
    assert read_probe(1)() > 0 and matmul_probe(torch.float32, 32) > 0
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: A Processor\n")
    assert cpu_name(tmp_path / "cpuinfo") == "A Processor"
    assert cpu_name(tmp_path / "none")


@pytest.mark.parametrize(("native", "measured"), [(True, "bfloat16"), (False, "float32")])
def test_no_bfloat16_product_runs_on_a_processor_without_its_instructions(
    native: bool, measured: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    probed: list[torch.dtype] = []
    monkeypatch.setattr(machine, "matmul_probe", lambda dtype, _: probed.append(dtype) or 1.0)
    monkeypatch.setattr(machine, "multiplies_bfloat16", lambda _: native)
    assert describe_machine("bfloat16").matmul_dtype == measured
    assert probed == [getattr(torch, measured)]


def test_commands(llama: Path, draft: Path, prompt_file: Path, tmp_path: Path) -> None:
    models = ["--target", str(llama), "--draft", str(draft), "--prompts", str(prompt_file)]
    common = [*models, "--limit", "1", "--max-tokens", "32", "--threads", "1", "--json"]
    parity = CliRunner().invoke(app, ["parity", *common])
    assert parity.exit_code == 0 and json.loads(parity.stdout)["differences"] == []
    out = tmp_path / "acceptance.json"
    acceptance = CliRunner().invoke(app, ["acceptance", *common, "--quantization", "int8", "--out", str(out)])
    assert acceptance.exit_code == 0 and json.loads(acceptance.stdout) == json.loads(out.read_text())
    assert json.loads(acceptance.stdout)["quantization"] == "int8"


@pytest.mark.parametrize("arguments", [["--shard", "2/1"], ["--threads", "0"], ["--dtype", "int8"]])
def test_bad_usage(llama: Path, draft: Path, prompt_file: Path, arguments: list[str]) -> None:
    models = ["--target", str(llama), "--draft", str(draft), "--prompts", str(prompt_file)]
    result = CliRunner().invoke(app, ["parity", *models, *arguments])
    assert isinstance(result.exception, InputError)
