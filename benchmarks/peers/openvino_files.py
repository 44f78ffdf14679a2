"""Models in OpenVINO's format, which GenAI itself makes of GGUF files; how its pipelines are loaded."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from pilotfish.config.cache import cache_folder, made_once

MODEL = "openvino_model.xml"
PRECISIONS = {"bfloat16": "bf16", "float32": "f32"}


def exported(file: Path) -> str:
    """The cached directory of a GGUF file's model, written on first use."""
    cached = cache_folder("openvino") / f"{file.stem}-{version('openvino-genai')}"
    return str(made_once(cached, lambda made: _export(file, made)))


def _export(file: Path, directory: Path) -> None:
    directory.mkdir()
    copy = directory / "model.gguf"
    copy.symlink_to(file)
    openvino_genai.LLMPipeline(str(copy), "CPU", enable_save_ov_model=True)  # beside the file
    copy.unlink()


def properties_of(threads: int, dtype: str) -> dict[str, Any]:
    """Products and KV in the precision of all others; else KV would have 8 bits."""
    precision = PRECISIONS[dtype]
    return {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": precision,
    }


def pipeline(target: str, properties: dict[str, Any], *, reuse: bool = False, **options: Any) -> Any:
    """`reuse` keeps KV for prompts that begin alike."""
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = reuse
    scheduler.max_num_batched_tokens = 1 << 30  # a prompt is one forward, as by default
    return openvino_genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, **options, **properties)


def inputs_of(prompt: list[int]) -> Any:
    """A prompt's tokens, which need no tokenizer of theirs."""
    ids = np.array([prompt], dtype=np.int64)
    return openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))


def greedy(max_tokens: int) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = max_tokens, True, False
    return config
