"""`pilotfish draft --backend`: what cannot be is one line."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from backend_rig import refused

from pilotfish.engine.drafts import draft_backends


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--backend", "tensorrt"), "backend: 'tensorrt' is not allowed; expected pilotfish or llama.cpp or openvino"),
        (("--backend-device", "NPU"), "backend_device: 'NPU' is not allowed; expected nothing with backend pilotfish"),
        (("--tokenizer", "x"), "tokenizer: 'x' is not allowed; expected nothing: "),
        (("--backend", "openvino", "--memory", "2"), "memory: 2.0 is not allowed; expected 0.0 with backend openvino"),
        (
            ("--backend", "openvino", "--quantization", "int8"),
            "quantization: 'int8' is not allowed; expected none with",
        ),
        (
            ("--backend", "openvino", "--kv-dtype", "int8"),
            "kv_dtype: 'int8' is not allowed; expected auto with backend",
        ),
        (("--backend", "openvino", "--draft", "eagle3"), "backend: 'openvino' is not allowed; expected pilotfish: "),
    ],
)
def test_options(capfd: pytest.CaptureFixture[str], options: tuple[str, ...], words: str) -> None:
    assert words in refused(capfd, "--pair", "pycode", *options)


@pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="needs openvino")
def test_a_device_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    line = refused(capfd, "--pair", "pycode", "--backend", "openvino", "--backend-device", "TPU")
    assert "backend_device: 'TPU' is not allowed; expected one of CPU" in line


@pytest.mark.parametrize(("backend", "extra"), [("openvino", "openvino"), ("llama.cpp", "llama-cpp")])
def test_an_engine_that_is_not_installed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, backend: str, extra: str
) -> None:
    monkeypatch.setattr(draft_backends, "find_spec", lambda _: None)
    line = refused(capfd, "--pair", "pycode", "--backend", backend)
    assert f"backend: {backend} needs" in line and f"pip install 'pilotfish[{extra}]'" in line


def test_a_gguf_file_needs_llama_cpp(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("nonsense")
    line = refused(capfd, "--draft", tmp_path / "text.gguf", "--backend", "openvino")
    assert "backend: 'openvino' is not allowed; expected llama.cpp: " in line
    line = refused(capfd, "--draft", tmp_path / "none.gguf", "--backend", "llama.cpp")
    assert "draft: " in line and "expected a model directory" in line
