"""Whose KV an engine's is: all that its bits follow from, but for the tokens, as facts with names for people."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import Quantization
from pilotfish.core.drafting.vocabulary import tokenizer_digest
from pilotfish.core.prefilling.segments import KVIdentity
from pilotfish.model.cpu.native import build_digest, built_by, instruction_set
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.kv_copy import layout_of
from pilotfish.model.loading.tensors import weight_files

#: Characters of a digest that stands in a fact.
SHOWN = 16
#: Bytes of a weight file that are read at a time.
PIECE = 4 << 20
#: Fields of a configuration that shape no KV: where the model is, and how long its sequences may get.
_ELSEWHERE = ("_name_or_path", "context")
#: The fact that says which features slots hold, if any: no output depends on it.
FEATURES = "features"


def kv_identity(config: EngineConfig, executor: TorchExecutor, tokenizer: Any) -> KVIdentity:
    """Of the model that `executor` runs as `config` says. Reads its weight files, which takes seconds where they are
    large."""
    facts = kv_facts(config, executor)
    facts["weights"] = _shown(*weights_digests(config.target))
    facts["tokenizer"] = _shown(tokenizer_digest(tokenizer))
    return KVIdentity(facts, layout_of(executor.kv))


def kv_facts(config: EngineConfig, executor: TorchExecutor) -> dict[str, str]:
    """All but the weights and the tokenizer, what people choose first."""
    model, versions = executor.model, {name: metadata.version(name) for name in ("pilotfish", "torch", "transformers")}
    return {
        "model": _model(model.config.to_dict()),
        "dtype": _name(model.dtype),
        "quantization": _quantization(config.quantization),
        "kv_dtype": _name(model.kv_dtype),
        "operations": _operations(config, executor),
        "ranks": str(config.tensor_parallel),
        **versions,
        **({} if executor.tap is None else {FEATURES: f"{executor.tap.width} of {executor.tap.digest}"}),
    }


def _model(fields: dict[str, Any]) -> str:
    own = {name: value for name, value in fields.items() if name not in _ELSEWHERE}
    digest = _shown(json.dumps(own, sort_keys=True, default=str))
    return f"{own['model_type']} of {own['num_hidden_layers']} layers, {digest}"


def _quantization(kind: Quantization) -> str:
    return kind if kind == "none" else f"{kind} of torchao {metadata.version('torchao')}"


def _operations(config: EngineConfig, executor: TorchExecutor) -> str:
    """Whose instructions: bits differ between them."""
    model = executor.model
    if model.device.type == "cuda":
        device = torch.cuda.get_device_name(model.device)
    elif model.native:
        device = f"{instruction_set()} {build_digest()} {built_by()}"
    else:
        device = f"{platform.machine()} {_shown(_processor())}"
    return f"{device}{' eager' if config.eager else ''}"


def _processor() -> str:
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.is_file() else []
    return "\n".join(line for line in dict.fromkeys(lines) if line.startswith(("model name", "flags", "Features")))


def weights_digests(directory: Path) -> list[str]:
    """Of every weight file, all of it."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(file_digest, weight_files(directory)))


def file_digest(path: Path) -> str:
    """Of all of it. A file that has not changed is not read again."""
    state = path.stat()
    return _content_digest(path.resolve(), state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=4096)
def _content_digest(path: Path, _size: int, _changed: int) -> str:
    """In pieces so large that threads which wait for the interpreter are rarely behind this one."""
    digest, piece = hashlib.sha256(), memoryview(bytearray(PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
    return digest.hexdigest()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shown(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:SHOWN]
