import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from pilotfish.config.fields import GGUFWeights, model_name
from pilotfish.config.workers import DraftConfig
from pilotfish.core.cache.prefix_cache import PrefixCache
from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.drafting.connected_targets import DraftIdentity
from pilotfish.core.drafting.draft_machine import DraftMachine
from pilotfish.core.drafting.draft_sessions import SessionTable
from pilotfish.core.drafting.level_choice import LevelShape
from pilotfish.core.drafting.vocabulary import added_tokens, tokenizer_digest
from pilotfish.core.drafting.vocabulary_map import MappedVocabulary, VocabularyMap
from pilotfish.core.features.feature_frames import FeatureNeed
from pilotfish.core.scheduling.executor import Executor
from pilotfish.engine.heads import ConfiguredHead, note_head
from pilotfish.engine.memory import device_of, load_configured, plan_memory, precision_here
from pilotfish.engine.processes.process import Signals, run_worker, supervised
from pilotfish.engine.token_table import token_table
from pilotfish.engine.trial import on_kernels
from pilotfish.errors import InputError, ModelError, ParameterError
from pilotfish.grammar.compile import Grammars
from pilotfish.grammar.threads import GrammarThreads
from pilotfish.model.backends.logits_executor import LogitsExecutor
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.heads.executor import HeadSetup
from pilotfish.model.heads.weights import is_head
from pilotfish.model.loading.configuration import load_config
from pilotfish.model.loading.metadata import load_tokenizer, read_generation_config
from pilotfish.model.pacer import Pacer
from pilotfish.wire.channel import Channel
from pilotfish.wire.curve_keys import load_pool_keys
from pilotfish.wire.sockets import ListeningChannel
from pilotfish.workers.draft import DraftWorker, Grower
from pilotfish.workers.records import Timeline, part_of

logger = logging.getLogger(__name__)

SLOTS = 8192  # KV slots unless the configuration says how many
#: Packages that each engine needs, by their modules; then the extra that installs them.
MODULES = {"openvino": {"openvino": "openvino"}, "llama.cpp": {"llama_cpp": "llama-cpp-python", "gguf": "gguf"}}
EXTRAS = {"openvino": "openvino", "llama.cpp": "llama-cpp"}
MAY_DIFFER = 0.05  # share of a file's tokens that may be written otherwise than the tokenizer writes them


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


def run_pool(config: DraftConfig, ready: Callable[[str], None] = lambda _: None) -> None:
    """Serves targets until SIGTERM or SIGINT; calls `ready` with the endpoint. InputError for unusable input."""
    run_worker(config.name, lambda signals: _serve(config, ready, signals))


def _serve(config: DraftConfig, ready: Callable[[str], None], signals: Signals) -> None:
    keys, name = load_pool_keys(config.key, config.allow), config.name
    pace, trace = config.model.paces.draft, config.model.trace
    with closing(ListeningChannel(config.listen, keys, insecure=config.insecure)) as channel, ExitStack() as stack:
        pacer = None if pace is None else Pacer("draft", pace)
        worker = make_worker(config, channel, pacer)
        logger.info("%s listens at %s", name, channel.endpoint)
        ready(channel.endpoint)
        if trace is not None:
            timeline = stack.enter_context(closing(Timeline(part_of(trace, name), name)))
            worker.observe = lambda record: timeline.forward(record, None if pacer is None else pacer.taken[-1])
        signals.call(worker.stop)
        worker.run()
    if pacer is not None:
        pacer.report()


def make_worker(config: DraftConfig, channel: Channel, pacer: Pacer | None = None) -> DraftWorker:
    model = config.model
    if model.core_set:
        os.sched_setaffinity(0, model.core_set)
    torch.set_num_threads(model.num_threads)
    ended = ExitStack()
    mapped = _mapped(config, ended)
    draft = _load_head(config) if is_head(model.target) else load_draft(config)
    tokenizer, executor = draft.tokenizer, draft.executor
    pool = SlotPool(executor.num_slots)
    table = SessionTable(pool, PrefixCache(pool) if model.prefix_cache else None)
    known_by = model_name(model.target), tokenizer_digest(tokenizer), added_tokens(tokenizer)
    identity = DraftIdentity(*known_by, config.revision, mapped)
    grammars = GrammarThreads(Grammars(tokenizer, executor.vocab_size, sorted(draft.eos_ids)))
    ended.callback(grammars.close)
    shape = LevelShape(config.leaves, config.children)
    machine = DraftMachine(identity, table, shape, executor.context, grammars.pending, draft.features)
    grower = Grower(executor, table, config.children, pacer, grammars.masks)
    return DraftWorker(machine, grower, channel, ended=ended.close)


def _mapped(config: DraftConfig, ended: ExitStack) -> dict[str, MappedVocabulary]:
    draft, named = config.model.target, config.target_tokenizer
    if not named:
        return {}
    if is_head(draft):
        raise ParameterError("target_tokenizer", str(named[0]), f"nothing: {draft} is a trained head, of its target's")
    tokenizer = load_tokenizer(config.tokenizer_directory)
    vocab_size = len(tokenizer) if config.is_gguf else load_config(draft).vocab_size
    return mapped_vocabularies(named, tokenizer, vocab_size, ended)


def mapped_vocabularies(
    directories: Sequence[Path], draft: Any, vocab_size: int, ended: ExitStack
) -> dict[str, MappedVocabulary]:
    """By the digests of the directories' tokenizers. `draft` is a tokenizer whose model has `vocab_size` embeddings;
    `ended` closes threads. ParameterError names an unusable path."""
    made = dict[str, MappedVocabulary]()
    for directory in directories:
        target = load_tokenizer(directory)
        if (digest := tokenizer_digest(target)) == tokenizer_digest(draft):
            raise ParameterError("target_tokenizer", str(directory), "tokenizers other than the draft's own")
        try:
            one = VocabularyMap(token_table(target, len(target)), token_table(draft, vocab_size))
            threads = GrammarThreads(Grammars(target, one.size, ()))
            ended.callback(threads.close)
            made[digest] = MappedVocabulary(one, added_tokens(target), threads.pending, threads.masks)
        except InputError as error:
            reason = f"target_tokenizer: {directory} cannot be mapped: {error}"
            raise ParameterError.described("target_tokenizer", reason) from error
        logger.info("%s: %d of its tokens can be guessed", directory, len(one.shared.ids))
    return made


@dataclass(frozen=True)
class LoadedDraft:
    executor: Executor
    tokenizer: Any
    eos_ids: frozenset[int]
    features: FeatureNeed | None = None  # of a trained head


def load_draft(config: DraftConfig) -> LoadedDraft:
    model = config.model
    if config.target is not None:
        raise ParameterError("target", str(config.target), f"nothing: {model.target} is a model, no trained head")
    tokenizer = load_tokenizer(config.tokenizer_directory)
    if config.backend != "pilotfish":
        return _load_backend(config, tokenizer)
    logger.info("%s", precision_here(model, model.target))
    slots, vocab_size = plan_memory(model).slots, len(tokenizer)
    executor, _ = on_kernels(
        model, "the draft", lambda own: TorchExecutor(load_configured(own, own.target), slots, vocab_size=vocab_size)
    )
    return LoadedDraft(executor, tokenizer, executor.model.generation.eos_ids)


def _load_backend(config: DraftConfig, tokenizer: Any) -> LoadedDraft:
    executor, directory = make_backend(config, tokenizer), config.tokenizer_directory
    eos = tokenizer.eos_token_id if config.is_gguf else load_config(directory).eos_token_id
    return LoadedDraft(executor, tokenizer, read_generation_config(directory, eos, executor.vocab_size).eos_ids)


def _load_head(config: DraftConfig) -> LoadedDraft:
    model, target = config.model, config.target
    if config.backend != "pilotfish":
        raise ParameterError("backend", config.backend, f"pilotfish: {model.target} is a trained head")
    if target is None:
        raise ParameterError("target", None, f"the directory of the target of {model.target}, which is a trained head")
    head, tokenizer = ConfiguredHead.of(model, model.target, target), load_tokenizer(target)
    precision, fields = precision_here(model, target), load_config(target)
    logger.info("%s", precision)
    memory, files = plan_memory(model, head=head), head.either()
    if not supervised():  # its parent has said it
        note_head(head, files[0], fields.context)
    vocab_size = min(len(tokenizer), fields.vocab_size)
    setup = HeadSetup(device_of(model), precision.dtype, memory.slots, model.eager, vocab_size)
    executor, _ = on_kernels(model, "the draft", lambda own: files[0].executor(replace(setup, eager=own.eager)))
    eos_ids = read_generation_config(target, fields.eos_token_id, fields.vocab_size).eos_ids
    need = FeatureNeed(tuple(one.digest for one in files), executor.feature_width, head.target.digest())
    return LoadedDraft(executor, tokenizer, eos_ids, need)
