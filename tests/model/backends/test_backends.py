"""Drafts on other engines compute what our own executor computes, and guess as well; no output depends on them."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_rig import BACKENDS, HAS_OPENVINO, PAIR, VOCAB, Traffic, compare, own, refused, shared
from sizes import in_soak, sized
from support import DENSE, write_model
from support import VOCAB as TINY_VOCAB

from pilotfish import LLM, SamplingParams
from pilotfish.config.engine import EngineConfig
from pilotfish.core.drafting.drafter import Drafter, NoDrafter
from pilotfish.core.scheduling.executor import SequenceRows
from pilotfish.engine.drafts import draft_pool
from pilotfish.engine.engine import Engine
from pilotfish.errors import ModelError, ParameterError
from pilotfish.model.batch import Buckets
from pilotfish.model.loading.loader import load_model
from pilotfish.workers.lm import LMDrafter

#: Of logits in float32: llama.cpp's attention is less exact. Another path's logits differ by more than 1.
TOLERANCE = {"openvino": 2e-3, "llama.cpp": 0.06}
PROMPTS = ["def mean(values):\n", "import os\nfor name in", "class Tree:\n    def", "x = [1, 2,"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(sized(1, 2)))
def test_logits_are_those_of_our_own_executor(backend: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "openvino":  # in forwards of few rows: what is more goes in several
        monkeypatch.setattr("pilotfish.model.backends.openvino_executor.BUCKETS", Buckets(rows=(1, 2, 3, 4)))
    compare(shared(backend), own(), Traffic(seed), sized(25, 300), TOLERANCE[backend])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forward_may_keep_no_row(backend: str) -> None:
    executor, reference = shared(backend), own()
    first = next(Traffic(3).forwards(1))[0]
    length = len(first.tokens) - 1
    head = SequenceRows(0, first.tokens[:length], first.prefix_slots[:length], first.nodes, [])
    last = SequenceRows(length, first.tokens[length:], first.prefix_slots, first.nodes, [0])
    assert executor.logits([head]).shape == reference.forward([head]).shape == (0, VOCAB)
    assert (executor.logits([last]) - reference.forward([last])).abs().max() < TOLERANCE[backend]


def drafted(drafter: Drafter, temperature: float) -> tuple[list[list[int]], float]:
    """Outputs, and accepted tokens a step."""
    config = EngineConfig(target=PAIR.target, dtype="float32", threads=1, kv_slots=2048, budget="fixed", nodes=8)
    engine = Engine(config, drafter)
    params = SamplingParams(max_tokens=sized(24, 200), temperature=temperature, seed=3)
    samples = [sample for prompt in PROMPTS for sample in engine.submit(prompt, params)]
    steps = accepted = 0
    while engine.busy:
        engine.step()
        record = engine.worker.last_step
        if record is not None:
            steps, accepted = steps + record.sequences, accepted + record.accepted
    return [sample.token_ids for sample in samples], accepted / steps


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("temperature", sized([0.8], [0.0, 0.8]))
def test_they_guess_as_well_and_change_nothing(backend: str, temperature: float) -> None:
    off, _ = drafted(NoDrafter(), temperature)
    ours, expected = drafted(LMDrafter(own(2048), 2), temperature)
    theirs, found = drafted(LMDrafter(shared(backend), 2), temperature)
    assert theirs == ours == off
    assert found == pytest.approx(expected, rel=0.03) and expected > 0.5


@in_soak
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pool_of_it_drafts_for_a_target(backend: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    command = ["draft", "--pair", "pycode", "--backend", backend, "--dtype", "float32", "--json", "--threads", "1"]
    listen = ["--listen", f"ipc://{tmp_path}/draft.sock"]
    params = [SamplingParams(max_tokens=60, temperature=t, seed=5) for t in (0.0, 0.8, 0.0, 0.8)]
    fixed: dict[str, Any] = {"dtype": "float32", "threads": 1, "kv_slots": 2048}
    with LLM(PAIR.target, **fixed) as plain:
        expected = [output.outputs[0].token_ids for output in plain.generate(PROMPTS, params)]
    with subprocess.Popen(
        [sys.executable, "-m", "pilotfish", *command, *listen], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            assert process.stdout is not None
            endpoint = json.loads(process.stdout.readline())["endpoint"]
            own_pace = {"pace": "target=10ms"}
            with LLM(PAIR.target, mode="async", draft_pool=(endpoint,), drafter="lm", **fixed, **own_pace) as llm:
                found = llm.generate(PROMPTS, params)
        finally:
            process.terminate()
    assert [output.outputs[0].token_ids for output in found] == expected


# -- what OpenVINO runs: models of each architecture without windows

#: Where a tiny model's own configuration has windows.
NO_WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "phi3": {"sliding_window": None},
    **{name: {"layer_types": ["full_attention"] * 2} for name in ("qwen3", "gemma2", "gemma3_text")},
}


def openvino(directory: Path, dtype: str = "float32", device: str = "CPU") -> Any:
    from pilotfish.model.backends.openvino_executor import OpenVINOExecutor

    return OpenVINOExecutor(directory, device, dtype, 512, 1, TINY_VOCAB)


@pytest.fixture(scope="module", params=DENSE)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of a model that is converted once, which takes seconds."""
    from pilotfish.model.backends import openvino_executor, openvino_model

    model = write_model(tmp_path_factory.mktemp("model"), request.param, **NO_WINDOWS.get(request.param, {}))
    converted = openvino_model.converted(load_model(model, torch.float32, torch.device("cpu"), eager=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(openvino_executor, "converted", lambda _: converted)
        yield model


def skip_where_openvino_dies(directory: Path) -> None:
    """OpenVINO 2026.4 divides by zero where it compiles in bfloat16 on some virtual machines with AMX."""
    call = f"OpenVINOExecutor(Path({str(directory)!r}), 'CPU', 'bfloat16', 512, 1, {TINY_VOCAB})"
    script = f"from pathlib import Path\nfrom pilotfish.model.backends.openvino_executor import *\n{call}"
    code = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode
    if code == -signal.SIGFPE:
        pytest.skip("OpenVINO divides by zero here")
    assert code == 0


@in_soak
@HAS_OPENVINO
def test_architectures(directory: Path) -> None:
    compare(openvino(directory), own(512, directory), Traffic(6, vocab=TINY_VOCAB), 25)


@in_soak
@HAS_OPENVINO
def test_bfloat16_is_near(directory: Path) -> None:
    skip_where_openvino_dies(directory)
    theirs, ours = openvino(directory, "bfloat16"), own(512, directory)
    for forward in Traffic(2, vocab=TINY_VOCAB).forwards(10):
        found, expected = theirs.logits(forward), ours.forward(forward)
        assert torch.nn.functional.cosine_similarity(found, expected).min() > 0.99


@HAS_OPENVINO
def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="sliding windows; backend openvino has no such layers"):
        openvino(write_model(tmp_path / "windows", "mistral"))
    with pytest.raises(ModelError, match="experts or dynamic rotary embeddings; backend openvino has neither"):
        openvino(write_model(tmp_path / "experts", "qwen3_moe"))
    with pytest.raises(ParameterError, match="backend_device: 'TPU' is not allowed; expected one of CPU"):
        openvino(write_model(tmp_path / "plain", "llama"), device="TPU")


# -- `pilotfish draft --backend`: what cannot be is one line


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--backend", "tensorrt"), "backend: 'tensorrt' is not allowed; expected pilotfish or llama.cpp or openvino"),
        (("--backend-device", "NPU"), "backend_device: 'NPU' is not allowed; expected nothing with backend pilotfish"),
        (("--tokenizer", "x"), "tokenizer: 'x' is not allowed; expected nothing: "),
        (("--backend", "openvino", "--memory", "2"), "memory: 2.0 is not allowed; expected 0.0 with backend openvino"),
        (
            ("--backend", "openvino", "--quantization", "int8"),
            "quantization: 'int8' is not allowed; expected none",
        ),
        (
            ("--backend", "openvino", "--kv-dtype", "int8"),
            "kv_dtype: 'int8' is not allowed; expected auto",
        ),
        (("--backend", "openvino", "--draft", "eagle3"), "backend: 'openvino' is not allowed; expected pilotfish: "),
    ],
)
def test_options(capfd: pytest.CaptureFixture[str], options: tuple[str, ...], words: str) -> None:
    assert words in refused(capfd, "--pair", "pycode", *options)


@pytest.mark.parametrize(("backend", "extra"), [("openvino", "openvino"), ("llama.cpp", "llama-cpp")])
def test_an_engine_that_is_not_installed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, backend: str, extra: str
) -> None:
    monkeypatch.setattr(draft_pool, "find_spec", lambda _: None)
    line = refused(capfd, "--pair", "pycode", "--backend", backend)
    assert f"backend: {backend} needs" in line and f"pip install 'pilotfish[{extra}]'" in line


def test_a_gguf_file_needs_llama_cpp(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("nonsense")
    line = refused(capfd, "--draft", tmp_path / "text.gguf", "--backend", "openvino")
    assert "backend: 'openvino' is not allowed; expected llama.cpp: " in line
    line = refused(capfd, "--draft", tmp_path / "none.gguf", "--backend", "llama.cpp")
    assert "draft: " in line and "expected a model directory" in line
