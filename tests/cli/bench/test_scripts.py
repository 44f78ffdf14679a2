"""The scripts of benchmarks/, how each is used; benches of a GPU and of the draft protocol. No test says how fast."""

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from programs import children, memory_bytes
from recording import RecordingKernels
from typer.testing import CliRunner

from pilotfish.cli.bench import gpu, protocol
from pilotfish.cli.bench.commands import app
from pilotfish.cli.bench.gpu import llama, random_model
from pilotfish.cli.bench.options import BENCHES
from pilotfish.cli.bench.plain_decode import PlainDecode
from pilotfish.cli.bench.protocol import ASKED, LEVELS, Costs, DraftExchange, costs_of, run_protocol
from pilotfish.cli.bench.report import MEBIBYTE, ProgressBar
from pilotfish.engine.trial import FELL_BACK
from pilotfish.errors import InputError

FOLDER = Path(__file__).parents[3] / "benchmarks"
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if "\n    run(" in path.read_text())
TINY = llama(layers=1, hidden=32, heads=4, kv_heads=2, ffn=48)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_has_a_help(script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setattr(sys, "argv", [str(script), "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    assert ended.value.code == 0 and "--json" in capsys.readouterr().out


def test_what_a_process_takes() -> None:
    assert memory_bytes(os.getpid()) > MEBIBYTE
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert child.pid in children(os.getpid())
    finally:
        child.communicate()
    assert memory_bytes(child.pid) == 0


# -- a GPU, as far as it goes without one


def test_without_a_gpu_it_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["gpu", "--prompts", "prompts.jsonl"])
    assert isinstance(result.exception, InputError) and str(result.exception) == "there is no CUDA device here"


def test_its_measurements_run_on_a_processor_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured, not how fast it is."""
    cpu = torch.device("cpu")
    for name, value in {"CONTEXTS": (40,), "ROWS": (1, 5), "CALLS": 2, "PROMPT": 20, "CONTEXT": 9, "SLOTS": 60}.items():
        monkeypatch.setattr(gpu, name, value)
    model = random_model(TINY, torch.float32, cpu, RecordingKernels())
    read = gpu.weight_bytes(model)
    linears = 32 * (4 + 2 * 2) * 64 + 32 * 4 * 64 + 3 * 32 * 48 + 8192 * 32
    assert read == 4 * linears, "all products, and no embedding"
    for row in gpu.steps(model, 10.0, 1):
        assert row["floor_ms"] > read / 1e7 and min(row["step_ms"], row["forward_ms"], row["sampling_ms"]) > 0
    monkeypatch.setattr(gpu, "TOKENS", 6)
    assert [row["requests"] for row in gpu.idle(model)] == [1, 8, 32]
    assert gpu.prompt(model, 1)["tflop_per_s"] > 0
    for row in (*gpu.attention(TINY, torch.float32, cpu, 10.0, 1), *gpu.products(TINY, torch.float32, cpu, 1)):
        assert row["us"] > 0
    monkeypatch.setitem(gpu.SHAPES, "1b", TINY)
    assert [row["draft"] for row in gpu.levels(torch.float32, cpu, 1) if min(row["ms"], row["device_ms"]) > 0] == [
        "1b",
        "bundled",
    ]


def test_it_compares_outputs_too() -> None:
    (refused,) = gpu.parity(["--kv-dtype fp8"], Path(gpu.__file__).parents[4] / "tests/gpu/prompts.jsonl", "cpu")
    assert refused == {"way": "--kv-dtype fp8", "problem": refused["problem"]} and "kv_dtype: " in refused["problem"]


@pytest.mark.parametrize(
    ("outcome", "difference", "problem"),
    [
        ({"vacuous": False}, [], "no KV came from elsewhere"),
        ({"vacuous": True}, [], "lm 4 shows nothing"),
        ({"vacuous": False}, [{"drafter": "lm 4", "index": 7}], "lm 4 differs at 7"),
    ],
)
def test_it_says_what_shows_no_equality(
    outcome: dict[str, bool], difference: list[dict[str, object]], problem: str, tmp_path: Path
) -> None:
    counts = dict.fromkeys(("compared", "differing", "from_host", "handed_over", "seconds"), 3)
    report = {**counts, "outcomes": [{"drafter": "lm 4", **outcome}], "differences": difference}
    (tmp_path / "report").write_text(json.dumps(report))
    fell_back = f"{FELL_BACK} the draft: a fault"
    for code, said, expected in ((0, "", ""), (1, "", problem), (0, fell_back, fell_back)):
        (tmp_path / "error").write_text(said)
        process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({code})"])
        found = gpu._compared("", tmp_path, process, time.monotonic() + 60)
        assert found == {"way": "bfloat16", **counts, "problem": found["problem"]}
        assert found["problem"].split(", ")[0] == expected


def test_what_is_compiled_decodes() -> None:
    step = PlainDecode(TINY, 3, 9, torch.float32, torch.device("cpu"))
    first = step()
    assert first.shape == (3,) and torch.equal(step(), first)


def test_a_random_model_runs_as_any_other() -> None:
    model = random_model(TINY, torch.bfloat16, torch.device("cpu"))
    assert model.dtype == torch.bfloat16 and model.config.vocab_size == 8192 and not model.generation.eos_ids


# -- the draft protocol's costs


@pytest.mark.parametrize("name", ASKED)
def test_both_sides_work(name: str) -> None:
    """Trees are attached, guesses are committed, and feedback comes where it is asked for."""
    exchange = DraftExchange(3, ASKED[name])
    for _ in range(8):
        exchange.step()
    (pool,), sessions = exchange.machine.pools, exchange.machine.sessions.values()
    assert [session.generation for session in sessions] == [1, 1, 1] and pool.score.trees >= 8 * LEVELS
    assert sum(len(session.request.output) for session in sessions) > 3 * 8 + 10
    assert not pool.drops.occurred.keys() - {"late_nodes"}
    assert set(ASKED[name]) <= set(pool.load.capabilities if pool.load is not None else ())
    assert (pool.score.verified > 100) == ("feedback" in ASKED[name])
    assert exchange.costs.levels >= 8 * LEVELS and exchange.costs.from_draft > 0


def test_feedback_costs_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "STEPS", 4)
    rows = run_protocol(BENCHES["protocol"].options(concurrencies="1,2", repeats=1), ProgressBar()).results["costs"]
    assert [(row["sequences"], row["asks for"]) for row in rows] == [(n, name) for n in (1, 2) for name in ASKED]
    six, _, feedback = rows[3:]
    assert feedback["bytes_a_step"] > six["bytes_a_step"] > rows[0]["bytes_a_step"] > 0


def test_costs_are_of_a_level_or_a_step_and_ratios_within_rounds() -> None:
    own = [Costs(180, 0.09, 0.018, 0.06, 18_000, 6_000), Costs(180, 0.18, 0.036, 0.12, 18_000, 6_000)]
    other = [Costs(180, 0.09, 0.018, 0.06, 9_000, 6_000)] * 2
    row = costs_of(own, other)
    assert (row["bytes_a_level"], row["bytes_a_step"]) == (100, 100)
    assert row["draft_us_a_level"].median == pytest.approx(750)
    assert row["target_us_a_step"].maximum == pytest.approx(2000)
    assert (row["over_first"].minimum, row["over_first"].maximum) == pytest.approx((1.0, 2.0))
