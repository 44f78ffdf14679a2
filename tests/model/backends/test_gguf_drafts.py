"""Drafts that are GGUF files, and drafts that llama.cpp cannot run: one line."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
from backend_rig import PAIR, VOCAB, Traffic, compare, made, own, refused
from sizes import in_soak
from support import write_model, write_tokenizer

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")
from pilotfish.config.engine import EngineConfig
from pilotfish.config.workers import DraftConfig
from pilotfish.core.drafting.draft_sessions import SessionTable
from pilotfish.engine.drafts.draft_pool import make_worker
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


def test_a_model_that_is_not_converted(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    directory = write_model(tmp_path / "olmo", "olmo2")
    line = refused(capfd, "--draft", directory, *OWN)
    assert "model type olmo2 is not converted to GGUF here" in line


def test_there_is_no_gpu(capfd: pytest.CaptureFixture[str], file: Path) -> None:
    import llama_cpp

    if llama_cpp.llama_supports_gpu_offload():
        pytest.skip("llama.cpp was built for a GPU here")
    line = refused(capfd, "--draft", file, *OWN, "--backend-device", "gpu")
    assert "backend_device: 'gpu' is not allowed; expected cpu: llama.cpp was built for no other device here" in line
