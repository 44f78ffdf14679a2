"""llama.cpp computes what transformers computes, from files that we wrote of the same weights; and drafts that it
cannot run are one line. Skipped where it is not installed."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from backend_rig import PAIR, VOCAB, Traffic, compare, made, own, refused
from sizes import in_soak
from support import write_model, write_tokenizer
from transformers import AutoModelForCausalLM

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")
from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import GGUFWeights
from pilotfish.config.workers import DraftConfig
from pilotfish.core.drafting.draft_sessions import SessionTable
from pilotfish.engine.drafts.draft_pool import make_worker
from pilotfish.errors import ModelError
from pilotfish.model.backends import llama_cpp_executor
from pilotfish.model.backends.gguf_file import gguf_of

pytestmark = in_soak
OWN = ("--backend", "llama.cpp")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A GGUF file with its tokenizer beside it."""
    shutil.copy(PAIR.draft / "tokenizer.json", tmp_path)
    return Path(shutil.copy(gguf_of(PAIR.draft, "f16"), tmp_path / "small.gguf"))


@pytest.mark.parametrize("most", [4, 12])
def test_few_sequences_and_little_room(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    for name, value in (("MOST_SEQUENCES", most), ("SPARE", 0.0), ("BATCH", 16)):
        monkeypatch.setattr(llama_cpp_executor, name, value)
    executor = made("llama.cpp", 256)
    compare(executor, own(256), Traffic(11, 256), 200, 0.06)
    assert len(executor.runs) <= most


def test_a_file_and_its_tokenizer(file: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "tokenizer.json").rename(elsewhere / "tokenizer.json")
    model = EngineConfig(target=file, kv_slots=128, threads=1)
    config = DraftConfig(model=model, listen="", backend="llama.cpp", tokenizer=elsewhere)
    worker = make_worker(config, None)  # type: ignore[arg-type]  # nothing is received
    executor = worker.grower.executor
    assert isinstance(worker.grower.table, SessionTable)
    assert (executor.num_slots, executor.vocab_size) == (128, VOCAB)
    assert worker.machine.identity.model == f"{tmp_path.name}/small.gguf"


def test_files_that_it_cannot_run(capfd: pytest.CaptureFixture[str], file: Path, tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("nonsense")
    line = refused(capfd, "--draft", tmp_path / "text.gguf", *OWN)
    assert "text.gguf cannot be loaded by llama.cpp: " in line
    raw = file.read_bytes()
    name = b"general.architecture" + struct.pack("<IQ", 8, 5) + b"llama"
    assert raw.count(name) == 1
    (tmp_path / "other.gguf").write_bytes(raw.replace(name, name[:-5] + b"nosuc"))
    line = refused(capfd, "--draft", tmp_path / "other.gguf", *OWN)
    assert "cannot be loaded by llama.cpp: " in line and "nosuc" in line
    assert "cpu or gpu" in refused(capfd, "--draft", file, *OWN, "--backend-device", "NPU")


def test_a_tokenizer_of_another_model(capfd: pytest.CaptureFixture[str], file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    write_tokenizer(other)
    line = refused(capfd, "--draft", file, *OWN, "--tokenizer", other)
    assert f"small.gguf is of another tokenizer than {other}" in line
    fields = json.loads((file.parent / "tokenizer.json").read_text())
    fields["model"]["vocab"] |= {f"more{n}": VOCAB + n for n in range(9)}
    (other / "tokenizer.json").write_text(json.dumps(fields))
    line = refused(capfd, "--draft", file, *OWN, "--tokenizer", other)
    assert f"has {VOCAB} tokens; at least {VOCAB + 10} are needed" in line
    (file.parent / "tokenizer.json").unlink()
    assert f"tokenizer: {file.parent} has no tokenizer.json" in refused(capfd, "--draft", file, *OWN)


def test_there_is_no_gpu(capfd: pytest.CaptureFixture[str], file: Path) -> None:
    import llama_cpp

    if llama_cpp.llama_supports_gpu_offload():
        pytest.skip("llama.cpp was built for a GPU here")
    line = refused(capfd, "--draft", file, *OWN, "--backend-device", "gpu")
    assert "backend_device: 'gpu' is not allowed; expected cpu: llama.cpp was built for no other device here" in line


# -- files

TOKENS = [7, 99, 250, 3, 41, 41, 180, 7, 99, 250]
ALLOWED = {"qwen3": {"use_sliding_window": False, "layer_types": ["full_attention", "full_attention"]}}


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind = request.param
    return write_model(tmp_path_factory.mktemp(kind), kind, head_dim=16, **ALLOWED.get(kind, {}))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(("weights", "error"), [("f32", 1e-4), ("f16", 0.02), ("bf16", 0.15)])
def test_llama_cpp_has_transformers_logits(model: Path, weights: GGUFWeights, error: float) -> None:
    import llama_cpp

    kind = llama_cpp.GGML_TYPE_F32
    options = {"n_ctx": 64, "n_threads": 1, "logits_all": True, "verbose": False, "type_k": kind, "type_v": kind}
    llama = llama_cpp.Llama(str(gguf_of(model, weights)), **options)
    llama.eval(TOKENS)
    with torch.inference_mode():
        reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)(torch.tensor([TOKENS]))
    got, expected = llama.scores[: len(TOKENS)], reference.logits[0].numpy()
    assert np.abs(got - expected).max() < error * np.abs(expected).max()
    norms = np.linalg.norm(got, axis=-1) * np.linalg.norm(expected, axis=-1)
    assert ((got * expected).sum(axis=-1) / norms).min() > 1 - error


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("mistral", "sliding windows"), ("qwen3", "sliding windows"), ("olmo2", "model type olmo2")],
)
def test_what_is_not_converted(kind: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=reason):
        gguf_of(write_model(tmp_path / kind, kind), "f32")
