"""Digests of all that KV and outputs follow from, as facts with names for people.

`kv_identity`      of KV but for its tokens: targets and prefill workers compare it, fact by fact
`kv_fingerprint`   the same for objects of KV in tiers
`fingerprint`      of outputs, but for prompt, parameters and seed: equal targets go on with each other's

Every byte of the weights counts; reading them takes about a second a GiB.
"""

import hashlib
import json
import os
import platform
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import torch

from pilotfish.config.engine import EngineConfig
from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS
from pilotfish.core.drafting.vocabulary import text_digest, tokenizer_digest
from pilotfish.core.prefilling.segments import KVIdentity
from pilotfish.model import cuda
from pilotfish.model.cpu.native import build_digest, built_by, instruction_set
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.kv_copy import layout_of
from pilotfish.model.loading.tensors import weight_files

SHOWN = 16  # characters of a digest that stands in a fact
#: Bytes of a weight file that are read at a time: threads that wait for the interpreter are rarely behind this one.
PIECE = 4 << 20
NICE = 19  # the lowest priority: what other threads leave
#: Fields of a configuration that shape no KV: where the model is, and how long its sequences may get.
_ELSEWHERE = ("_name_or_path", "context")
FEATURES = "features"  # the fact that says which features slots hold, if any: no output depends on it


def kv_identity(config: EngineConfig, executor: TorchExecutor, tokenizer: Any) -> KVIdentity:
    facts = kv_facts(config, executor)
    facts["weights"] = _shown(*weights_digests(config.target))
    facts["tokenizer"] = _shown(tokenizer_digest(tokenizer))
    return KVIdentity(facts, layout_of(executor.kv))


def kv_fingerprint(config: EngineConfig, executor: TorchExecutor) -> bytes:
    """Weights count if KV outlives this process. The layout of objects counts too."""
    weights = [] if config.kv_disk is None else weights_digests(config.target)
    facts, layout = kv_facts(config, executor), msgspec.to_builtins(layout_of(executor.kv))
    return hashlib.sha256(json.dumps([facts, weights, OBJECT_TOKENS, layout], sort_keys=True).encode()).digest()


def fingerprint(facts: dict[str, str], weights: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps([facts, list(weights)], sort_keys=True).encode()).hexdigest()


def output_facts(config: EngineConfig, executor: TorchExecutor, tokenizer: Any) -> dict[str, str]:
    model = executor.model
    facts = {
        **{name: fact for name, fact in kv_facts(config, executor).items() if name != FEATURES},
        "tokenizer": text_digest(tokenizer),
        "ends": " ".join(map(str, sorted(model.generation.eos_ids))),
        "context": str(model.config.context),
        **{name: metadata.version(name) for name in ("tokenizers", "llguidance")},  # stop strings and grammars
    }
    if model.device.type == "cpu" and not model.native:
        facts["threads"] = str(config.num_threads)  # by which torch divides its sums
    return facts


def kv_facts(config: EngineConfig, executor: TorchExecutor) -> dict[str, str]:
    model = executor.model
    return {
        "model": _model(model.config.to_dict()),
        "dtype": _name(model.dtype),
        "quantization": config.quantization,
        "kv_dtype": _name(model.kv_dtype),
        "operations": _operations(config, executor),
        "ranks": str(config.tensor_parallel),
        **{name: metadata.version(name) for name in ("pilotfish", "torch", "transformers")},
        **({} if executor.tap is None else {FEATURES: f"{executor.tap.width} of {executor.tap.digest}"}),
    }


def _model(fields: dict[str, Any]) -> str:
    own = {name: value for name, value in fields.items() if name not in _ELSEWHERE}
    digest = _shown(json.dumps(own, sort_keys=True, default=str))
    return f"{own['model_type']} of {own['num_hidden_layers']} layers, {digest}"


def _operations(config: EngineConfig, executor: TorchExecutor) -> str:
    """Bits differ between instruction sets."""
    model = executor.model
    if model.device.type == "cuda":
        sources = sorted(Path(cuda.__file__).parent.rglob("*.py"))  # whose order of sums decides the bits
        device = f"{torch.cuda.get_device_name(model.device)} {_shown(*(path.read_text('utf-8') for path in sources))}"
    elif model.native:
        device = f"{instruction_set()} {build_digest()} {built_by()}"
    else:
        device = f"{platform.machine()} {_shown(_processor())}"
    return f"{device}{' eager' if config.eager else ''}"


def _processor() -> str:
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.is_file() else []
    return "\n".join(line for line in dict.fromkeys(lines) if line.startswith(("model name", "flags", "Features")))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shown(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:SHOWN]


# -- weights


def read_weights(directory: Path) -> Future[list[str]]:
    digests = Future[list[str]]()

    def read() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            digests.set_result([file_digest(path) for path in weight_files(directory)])
        except Exception as error:
            digests.set_exception(error)

    threading.Thread(target=read, name="weights' digests", daemon=True).start()
    return digests


def weights_digests(directory: Path) -> list[str]:
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(file_digest, weight_files(directory)))


def file_digest(path: Path) -> str:
    """Cached while size and time of the file are unchanged."""
    state = path.stat()
    return _content_digest(path.resolve(), state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=4096)
def _content_digest(path: Path, _size: int, _changed: int) -> str:
    digest, piece = hashlib.sha256(), memoryview(bytearray(PIECE))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
    return digest.hexdigest()
