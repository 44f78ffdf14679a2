import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pilotfish.config.fields import GGUFWeights
from pilotfish.config.workers import DraftConfig
from pilotfish.engine.memory import precision_here
from pilotfish.errors import InputError, ModelError, ParameterError
from pilotfish.model.backends.logits_executor import LogitsExecutor
from pilotfish.model.loading.configuration import load_config

logger = logging.getLogger(__name__)

#: KV slots unless the configuration says how many.
SLOTS = 8192
#: Packages that each engine needs, by their modules; then the extra that installs them.
MODULES = {
    "openvino": {"openvino": "openvino"},
    "llama.cpp": {"llama_cpp": "llama-cpp-python", "gguf": "gguf"},
}
EXTRAS = {"openvino": "openvino", "llama.cpp": "llama-cpp"}
#: Share of a file's tokens that may be written otherwise than the tokenizer writes them.
MAY_DIFFER = 0.05


def make_backend(config: DraftConfig, tokenizer: Any) -> LogitsExecutor:
    refuse_absent(config.backend)
    make = _on_openvino if config.backend == "openvino" else _on_llama_cpp
    executor = make(config, tokenizer)
    device = config.backend_device or "its CPU"
    logger.info("%s runs on %s, on %s, with %d KV slots", config.name, config.backend, device, executor.num_slots)
    return executor


def refuse_absent(backend: str) -> None:
    """InputError for an engine that is not installed."""
    absent = [package for module, package in MODULES.get(backend, {}).items() if find_spec(module) is None]
    if absent:
        install = f"pip install 'pilotfish[{EXTRAS[backend]}]'"
        raise InputError(f"backend: {backend} needs {' and '.join(absent)}, not installed here: {install}")


def _on_openvino(config: DraftConfig, tokenizer: Any) -> LogitsExecutor:
    from pilotfish.model.backends.openvino_executor import OpenVINOExecutor

    model, device = config.model, config.backend_device or "CPU"
    given = min(len(tokenizer), load_config(model.target).vocab_size)
    return OpenVINOExecutor(model.target, device, _dtype(config), model.kv_slots or SLOTS, model.num_threads, given)


def _on_llama_cpp(config: DraftConfig, tokenizer: Any) -> LogitsExecutor:
    from pilotfish.model.backends.llama_cpp_executor import LlamaCppExecutor

    device = config.backend_device or "cpu"
    if device not in ("cpu", "gpu"):
        raise ParameterError("backend_device", device, "cpu or gpu: that which llama.cpp was built for")
    options: dict[str, bool] = {"on_gpu": device == "gpu", "wide_kv": _dtype(config) == "float32"}
    slots, threads, given = config.model.kv_slots or SLOTS, config.model.num_threads, len(tokenizer)
    if not config.is_gguf:
        given = min(given, load_config(config.model.target).vocab_size)
        return LlamaCppExecutor(_converted(config), slots, threads, given, **options)
    executor = LlamaCppExecutor(config.model.target, slots, threads, given, **options)
    if executor.unlike(tokenizer.convert_ids_to_tokens(range(given))) > MAY_DIFFER * given:
        raise ModelError(f"draft: {config.model.target} is of another tokenizer than {config.tokenizer_directory}")
    return executor


def _converted(config: DraftConfig) -> Path:
    """GPUs are all quick in float16. Writes a GGUF file on first use."""
    from pilotfish.model.backends.gguf_file import gguf_of

    weights: GGUFWeights = "f32" if _dtype(config) == "float32" else "bf16" if _on_cpu(config) else "f16"
    return gguf_of(config.model.target, weights)


def _dtype(config: DraftConfig) -> str:
    if config.is_gguf or not _on_cpu(config):
        return "float32" if config.model.dtype == "float32" else "bfloat16"
    return precision_here(config.model, config.model.target).name


def _on_cpu(config: DraftConfig) -> bool:
    return config.backend_device in ("", "cpu", "CPU")
