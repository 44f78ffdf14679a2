"""OpenVINO GenAI as a contestant: default hints, and without its cache of earlier prompts, which would spare it what
all others compute each time. Its models are those that GenAI itself makes of GGUF files."""

from __future__ import annotations

import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from pilotfish.cli.bench.compare.peer import DRAFT, GUESSES, LOOKUP, PLAIN, Generated, LoadedPeer, PeerSetup, Question
from pilotfish.config.cache import cache_folder, made_once
from pilotfish.config.text import config_of

PRECISIONS = {"bfloat16": "bf16", "float32": "f32"}
#: Tokens that are guessed at a time and the longest n-gram, as in GenAI's own example.
LOOKUP_OPTIONS: dict[str, Any] = {"num_assistant_tokens": 5, "max_ngram_size": 3}


def load(text: str) -> LoadedPeer:
    """`text` is a PeerSetup of GGUF files. Products and KV are in the precision of all others (not in 8 bits)."""
    setup = config_of(text, PeerSetup)
    precision = PRECISIONS[setup.dtype]
    hints = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
    properties = {"INFERENCE_NUM_THREADS": setup.threads, **hints}
    pipeline = partial(_pipeline, exported(Path(setup.target)), **properties)
    ways = {
        PLAIN: partial(_generate, pipeline()),
        LOOKUP: partial(_generate, pipeline(prompt_lookup=True), **LOOKUP_OPTIONS),
    }
    if setup.draft is not None:
        draft = openvino_genai.draft_model(exported(Path(setup.draft)), "CPU", **properties)
        ways[DRAFT] = assisted = partial(_generate, pipeline(draft_model=draft))
        ways |= {name: partial(assisted, num_assistant_tokens=guessed) for name, guessed in GUESSES.items()}
    return LoadedPeer(ways, f"weights float16, products and KV {setup.dtype}")


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


def _pipeline(target: str, **options: Any) -> Any:
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = 1 << 30  # a prompt is one forward, as by default
    return openvino_genai.LLMPipeline(target, "CPU", scheduler_config=scheduler, **options)


def _generate(pipe: Any, question: Question, **options: int) -> Generated:
    """A prompt's tokens need no tokenizer of theirs. Without `num_assistant_tokens` GenAI chooses how many to guess."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = question.max_tokens, True, False
    for name, value in options.items():
        setattr(config, name, value)
    ids = np.array([question.prompt], dtype=np.int64)
    began = time.perf_counter()
    inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
    tokens = pipe.generate(inputs, config).tokens[0]
    return Generated(seconds=time.perf_counter() - began, tokens=list(tokens))
