import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial

import torch

from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import model_name
from pilotfish.config.workers import PrefillConfig
from pilotfish.core.cache.prefix_cache import PrefixCache
from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.prefilling.prefill_machine import PrefillLimits, PrefillMachine
from pilotfish.core.prefilling.prefill_messages import MAC_KEY_BYTES, PREFILL_VERSION, Welcome
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.scheduler import Scheduler
from pilotfish.engine.fingerprint import kv_identity
from pilotfish.engine.heads import choose_layers, read_head_of_features
from pilotfish.engine.memory import load_configured, plan_memory, precision_here
from pilotfish.engine.pools.remote_pools import SWITCH_INTERVAL
from pilotfish.engine.processes.host_memory import GIB
from pilotfish.engine.processes.process import Signals, keep_freed_memory, run_worker
from pilotfish.engine.tapping import with_features
from pilotfish.engine.trial import on_kernels, record_forwards
from pilotfish.errors import ModelError, ParameterError
from pilotfish.kv.arena import Arena
from pilotfish.kv.nixl import NixlOffer, nixl_installed
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.heads.parts import feature_tap
from pilotfish.model.kv_copy import copier_of
from pilotfish.model.loading.configuration import common_window, load_config
from pilotfish.model.loading.metadata import load_tokenizer
from pilotfish.model.pacer import Pacer
from pilotfish.wire.channel import Channel, ChannelThread
from pilotfish.wire.curve_keys import load_pool_keys
from pilotfish.wire.sockets import ListeningChannel
from pilotfish.workers.export import Exporter, SharedMachine
from pilotfish.workers.prefill import PrefillWorker
from pilotfish.workers.records import Timeline, part_of

logger = logging.getLogger(__name__)

TICK = 0.1  # seconds between two looks at leases


def run_prefill_pool(config: PrefillConfig, ready: Callable[[str], None] = lambda _: None) -> None:
    """Serves targets until SIGTERM or SIGINT; calls `ready` with the endpoint. InputError for unusable input."""
    run_worker(config.name, lambda signals: _serve(config, ready, signals))


def _serve(config: PrefillConfig, ready: Callable[[str], None], signals: Signals) -> None:
    keys, name = load_pool_keys(config.key, config.allow), config.name
    pace, trace = config.model.paces.prefill, config.model.trace
    pacer = None if pace is None else Pacer("prefill", pace)
    with closing(ListeningChannel(config.listen, keys, insecure=config.insecure)) as channel, ExitStack() as stack:
        timeline = None if trace is None else stack.enter_context(closing(Timeline(part_of(trace, name), name)))
        worker = stack.enter_context(serving(config, channel, pacer))
        if timeline is not None:
            worker.shared.observe_lease = timeline.lease
            worker.observe = lambda record: timeline.forward(record, None if pacer is None else pacer.taken[-1])
        welcome = worker.shared.machine.welcome
        memory = {"shm": welcome.shared_memory, "nixl": welcome.remote_memory}
        transports = [*(kind for kind, given in memory.items() if given is not None), channel.endpoint.split(":")[0]]
        logger.info("%s listens at %s; segments are read by %s", name, channel.endpoint, ", ".join(transports))
        ready(channel.endpoint)
        signals.call(worker.stop)
        worker.run()
    if pacer is not None:
        pacer.report()


@contextmanager
def serving(config: PrefillConfig, channel: Channel, pacer: Pacer | None = None) -> Iterator[PrefillWorker]:
    model = with_features(config.model)
    if config.nixl and not nixl_installed():
        raise ParameterError("nixl", True, "NIXL, which is not installed: pip install 'pilotfish[nixl]'")
    if common_window(load_config(model.target)):
        raise ModelError(f"target: every layer of {model.target} has a sliding window; its KV is not handed over")
    if model.core_set:
        os.sched_setaffinity(0, model.core_set)
    torch.set_num_threads(model.num_threads)
    tokenizer = load_tokenizer(model.target)
    logger.info("%s", precision_here(model, model.target))
    heads, segments = read_head_of_features(model), round(config.segment_memory * GIB)
    memory = plan_memory(model, segments)
    logger.info(memory.describe())

    def load(model: EngineConfig) -> TorchExecutor:
        loaded, tap = load_configured(model, model.target, model.max_model_len), None
        if heads:
            files = choose_layers(heads, loaded, tokenizer)
            tap = feature_tap(files, loaded.device, loaded.dtype, eager=model.eager)
        executor = TorchExecutor(loaded, memory.slots, pacer, tap=tap)
        executor.count_layers()
        return executor

    recorded = partial(record_forwards, max_rows=model.max_rows, max_samples=1, params=SamplingParams(temperature=0.0))
    executor, model = on_kernels(model, "this worker, whose KV only targets with --eager take", load, recorded)
    with ExitStack() as stack:
        arena = Arena(segments, config.segment_bytes)
        stack.callback(arena.close)
        offer = stack.enter_context(closing(NixlOffer(arena))) if config.nixl else None
        identity = kv_identity(model, executor, tokenizer)
        if (least := max(identity.layout.token_bytes, identity.layout.features)) > config.segment_bytes:
            allowed = f"at least {least}, which a token takes in a layer"
            raise ParameterError("segment_bytes", config.segment_bytes, allowed)
        context = min(executor.context, executor.num_slots - 1)  # a request has a slot more than tokens
        known_by, memories = model_name(model.target), (arena.offer(), None if offer is None else offer.memory)
        own = (config.lease, config.segment_bytes, *memories)
        welcome = Welcome(PREFILL_VERSION, identity, known_by, context, bytes(MAC_KEY_BYTES), *own)
        limits = PrefillLimits(executor.vocab_size, config.max_queued_tokens, memory.slots // 2)
        machine = PrefillMachine(welcome, limits, arena, partial(secrets.token_bytes, MAC_KEY_BYTES))
        thread = ChannelThread(channel, TICK)
        shared = SharedMachine(machine, thread.post)
        executor.progress.reset()
        exporter = Exporter(shared, arena, copier_of(executor.kv).read_layers, executor.progress)
        pool = SlotPool(memory.slots)
        cache = PrefixCache(pool) if model.prefix_cache else None
        scheduler = Scheduler(pool, model.max_rows, model.max_requests, cache)
        worker = PrefillWorker(shared, scheduler, executor, exporter, executor.progress)
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_INTERVAL)
        keep_freed_memory()
        stack.callback(thread.close)
        stack.callback(shared.close)
        stack.callback(exporter.close)
        exporter.start()
        thread.start(shared.receive, shared.tick)
        yield worker
