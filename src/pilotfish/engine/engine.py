import logging
import math
import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from llguidance import LLMatcher

from pilotfish.config.engine import EngineConfig
from pilotfish.config.hardware.pace import Pace
from pilotfish.core.cache.prefix_cache import PrefixCache
from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS
from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.drafting.drafter import Drafter
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.budget import Budget
from pilotfish.core.scheduling.request import FinishReason
from pilotfish.core.scheduling.scheduler import Scheduler
from pilotfish.core.scheduling.step import RequestCommit, RowCosts
from pilotfish.engine.drafts.drafters import Drafters
from pilotfish.engine.drafts.remote_drafts import RemoteDrafts, hello_of
from pilotfish.engine.drafts.shadow_drafts import ShadowDrafts, ShadowedTarget
from pilotfish.engine.fingerprint import kv_fingerprint, kv_identity
from pilotfish.engine.heads import ConfiguredHead, choose_layers, note_head, read_head_of_features
from pilotfish.engine.memory import device_of, load_configured, plan_memory, precision_here
from pilotfish.engine.pools.remote_pools import FollowedMembers
from pilotfish.engine.prefills.remote_prefills import HandOvers, RemotePrefills
from pilotfish.engine.processes.host_memory import GIB, divided
from pilotfish.engine.processes.ranks import Ranks
from pilotfish.engine.sample import Prompt, Sample, SampleMaker
from pilotfish.engine.tapping import with_features
from pilotfish.engine.targets.members import MembersFile
from pilotfish.engine.trial import make_budget, on_kernels, record_forwards, step_costs
from pilotfish.errors import EngineError, ParameterError, RankLost
from pilotfish.grammar.compile import Grammars
from pilotfish.grammar.threads import GrammarThreads
from pilotfish.kv.disk import DiskStore
from pilotfish.kv.objects import ObjectFormat
from pilotfish.kv.tiers import HostStore, KVTiers
from pilotfish.model.collective import ProcessGroup
from pilotfish.model.exactness import note_company
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.feature_tap import FeatureTap
from pilotfish.model.heads.parts import feature_tap
from pilotfish.model.heads.spec import HeadFiles
from pilotfish.model.kv_copy import copier_of
from pilotfish.model.loading.configuration import common_window
from pilotfish.model.loading.loader import LoadedModel
from pilotfish.model.loading.metadata import load_tokenizer
from pilotfish.model.loading.shards import Shard
from pilotfish.model.pacer import Pacer
from pilotfish.model.sampling import PERTURBED
from pilotfish.openmp import warn_of_spinning
from pilotfish.wire.serving import Delta, EngineRequest, PartialOutput
from pilotfish.workers.ahead import AheadWorker
from pilotfish.workers.records import Timeline, merge, part_of
from pilotfish.workers.target import GuardedDrafter, TargetWorker
from pilotfish.workers.target_shadow import ShadowSetup

logger = logging.getLogger(__name__)

DISK_SIZE = 16.0  # GiB of KV on disk, where no size is given


class Engine:
    """A target in this process, maybe with drafts. `submit`, then `step` while it is `busy`."""

    exact = False  # whether outputs are the same with and without speculation
    _head: HeadFiles | None = None  # until it is the drafters'
    tiers: KVTiers | None = None
    ranks: Ranks | None = None
    grammars: GrammarThreads | None = None
    shadows: ShadowDrafts | None = None
    _members: FollowedMembers | None = None

    def __init__(
        self,
        config: EngineConfig,
        drafter: Drafter | None = None,
        remote: RemoteDrafts | None = None,
        prefills: RemotePrefills | None = None,
    ) -> None:
        """`drafter` replaces the configured one. `remote` and `prefills` run already; the engine closes them."""
        self.config = config = with_features(divided(config))
        self.remote = remote
        self.prefills = prefills
        self._pacers: list[Pacer] = []
        self._timeline: Timeline | None = None
        self._samples: dict[int, Sample] = {}
        self._next_id = 0
        self._cores_before = os.sched_getaffinity(0)
        try:
            members = None if config.members is None else MembersFile(config.members)
            if remote is None and drafter is None and config.mode == "async":
                self.remote = RemoteDrafts(config)
            if prefills is None and config.prefills_elsewhere:
                self.prefills = RemotePrefills(config, frozenset() if self.remote is None else self.remote.taken)
            if config.shadow_pool:
                self.shadows = ShadowDrafts(config)
            self._load(self._place(), drafter)
            if members is not None:
                self._members = FollowedMembers(members, self.remote, self.prefills)
        except BaseException:
            self.close()
            raise

    def _load(self, cores: frozenset[int], drafter: Drafter | None) -> None:
        config = self.config
        torch.set_num_threads(config.threads or len(cores) or config.num_threads)
        self.tokenizer = load_tokenizer(config.target)
        self.precision = precision_here(config, config.target)
        logger.info("%s", self.precision)
        heads = read_head_of_features(config)
        self.memory = plan_memory(config)
        logger.info(self.memory.describe())
        load = partial(self._load_target, heads, self._pacer("target", config.paces.target))
        self.executor, self.config = on_kernels(config, "the target, without a promise", load, self._try)
        config = self.config  # it may be eager now
        self.model = self.executor.model
        self.exact |= device_of(config).type == "cpu" and self.model.dtype == torch.float32
        if config.features is not None:
            note_head(ConfiguredHead.of(config, config.features, config.target), heads[0], self.model.config.context)
        if not self.model.native:
            warn_of_spinning()
        vocab_size, eos_ids = self.model.config.vocab_size, sorted(self.model.generation.eos_ids)
        self.grammars = GrammarThreads(Grammars(self.tokenizer, vocab_size, eos_ids))
        self._maker = SampleMaker(self.tokenizer, self.model, self.grammars.grammars)
        head, self._head = self._head, None
        draft_pacer = partial(self._pacer, "draft", config.paces.draft)
        drafters = Drafters(config, self.executor, self.tokenizer, self.grammars, self.remote, head, draft_pacer)
        self.drafters = drafters
        self.drafter = drafter or self.drafters.make(() if config.mode == "off" else config.drafters)
        if not config.eager:  # a draft that fell back took the kernels from draws after a forward
            self.exact &= self.model.device.type in ("cpu", *PERTURBED)
        pool = SlotPool(self.memory.slots, common_window(self.model.config))
        budget = make_budget(config, self.executor, self.drafter)
        tiers = self.tiers = make_tiers(config, self.executor)
        cache = PrefixCache(pool, dropped=None if tiers is None else tiers.dropped) if config.prefix_cache else None
        handovers = self._connect_prefills()
        costs = RowCosts(self.model.scored_cost)
        scheduler = Scheduler(pool, config.max_rows, config.max_requests, cache, tiers, handovers, costs)
        kind = AheadWorker if self.executor.overlaps else TargetWorker
        self.worker = kind(self.executor, scheduler, self.drafter, budget, masks=self.grammars.masks)
        if self.shadows is not None:
            self._start_shadows(self.shadows, self.grammars)
        self.reset_pacing()  # what was measured at start is no part of a run
        if config.trace is not None:
            self._timeline = Timeline(part_of(config.trace, "target"), "target")
            self.worker.observe = self._timeline.step

    def _load_target(self, heads: list[HeadFiles], pacer: Pacer | None, config: EngineConfig) -> TorchExecutor:
        """The whole target, or rank 0's shard once the other ranks have theirs. `heads` are readings of one head."""
        ranks, slots = self.ranks, self.memory.slots
        group = None if ranks is None else ProcessGroup(Shard(0, config.tensor_parallel), device_of(config))
        model = load_configured(config, config.target, config.max_model_len, group)
        if ranks is None or group is None:
            return TorchExecutor(model, slots, pacer, tap=self._tap(heads, model, config))
        ranks.begin(slots)
        group.connect(ranks.meeting)
        return TorchExecutor(model, slots, pacer, together=ranks.together, tap=self._tap(heads, model, config))

    def _try(self, executor: TorchExecutor) -> None:
        exact, params = note_company(executor), SamplingParams(**executor.model.generation.defaults)
        record_forwards(executor, self.config.max_rows, self.config.max_requests, params)
        self.exact = exact

    def _tap(self, heads: list[HeadFiles], model: LoadedModel, config: EngineConfig) -> FeatureTap | None:
        if not heads:
            return None
        files = choose_layers(heads, model, self.tokenizer)
        self._head = files if config.mode == "sync" else None
        return feature_tap(files, model.device, model.dtype, eager=config.eager)

    def _start_shadows(self, shadows: ShadowDrafts, grammars: GrammarThreads) -> None:
        config, beside = self.config, [kind for kind in self.config.drafters if kind != "lm"]
        limits = (self.memory.slots, config.max_rows, config.max_requests)
        setup = ShadowSetup(*limits, common_window(self.model.config), config.prefix_cache, config.shadow_share)
        target = ShadowedTarget(
            hello=hello_of(config, self.tokenizer, self.executor.vocab_size),
            executor=self.executor,
            costs=step_costs(self.executor, config.max_rows),
            setup=setup,
            beside=partial(self.drafters.make, beside),
            grammars=grammars.pending,
        )
        shadows.start(target)

    def _connect_prefills(self) -> HandOvers | None:
        """ParameterError if every layer has a window: then requests give back slots that a hand-over would fill."""
        if self.prefills is None:
            return None
        if common_window(self.model.config):
            if self.config.members is not None:  # which may be there for its drafts
                self.prefills = None
                return None
            field = "prefill_pool" if self.config.prefill_pool else "prefill_workers"
            given = getattr(self.config, field)
            raise ParameterError(field, given, "none for a model whose layers all have sliding windows")
        identity, kv = partial(kv_identity, self.config, self.executor, self.tokenizer), self.executor.kv
        return self.prefills.connect(identity, copier_of(kv).write_layers)

    def _place(self) -> frozenset[int]:
        cores = self.config.core_set if self.remote is None else self.remote.cores
        if self.prefills is not None:
            cores = self.prefills.cores or cores
        if self.config.tensor_parallel > 1:
            self.ranks = Ranks(self.config, cores or frozenset(os.sched_getaffinity(0)))
            cores = self.ranks.cores
        if cores:
            os.sched_setaffinity(0, cores)
        return cores

    def close(self) -> None:
        """Ends every sample, ranks and workers. Idempotent; also done when the process ends."""
        self.abort_all()
        for part in (self._members, self.shadows, self.ranks, self.prefills, self.remote, self.grammars):
            if part is not None:
                part.close()
        if self.tiers is not None:
            if self.config.kv_disk is not None:
                self.worker.scheduler.save_all()
            if not self.tiers.close() and self.config.kv_disk is not None:
                logger.warning("KV: not all of it was written to %s in time", self.config.kv_disk)
            self.tiers = None
        if self._timeline is not None and self.config.trace is not None:
            self._timeline.close()
            counts = {"draft": self.config.draft_workers, "prefill": self.config.prefill_workers}
            names = [f"{role} {i}" for role, count in counts.items() for i in range(count)]
            merge([part_of(self.config.trace, name) for name in ("target", *names)], self.config.trace)
            self._timeline = None
        os.sched_setaffinity(0, self._cores_before)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _pacer(self, role: str, pace: Pace | None) -> Pacer | None:
        if pace is None:
            return None
        self._pacers.append(Pacer(role, pace))
        return self._pacers[-1]

    def drops(self) -> dict[str, dict[str, int]]:
        return {} if self.remote is None else {pool.name: pool.drops.occurred for pool in self.remote.pools}

    def pacing(self) -> list[Pacer]:
        return self._pacers

    def reset_pacing(self) -> None:
        for pacer in self._pacers:
            pacer.reset()

    def use(self, drafter: Drafter, budget: Budget) -> None:
        """EngineError while requests run."""
        if self.worker.scheduler.busy:
            raise EngineError("the drafter cannot be swapped while requests run")
        self.drafter = drafter
        self.worker.drafter = GuardedDrafter(drafter, self.model.config.vocab_size)
        self.worker.budget = budget

    # -- requests

    def sampling_params(self, **given: Any) -> SamplingParams:
        return SamplingParams(**{**self.model.generation.defaults, **given})

    def submit(self, prompt: Prompt, params: SamplingParams, cache_salt: str | None = None) -> list[Sample]:
        """PromptError or ParameterError affect nothing else."""
        return self.add(EngineRequest(self.check_prompt(prompt), params, cache_salt))

    def add(
        self, request: EngineRequest, compiled: LLMatcher | None = None, resumed: Sequence[PartialOutput] | None = None
    ) -> list[Sample]:
        """`compiled` is the grammar of its constraint. `resumed`: the only samples to queue, which other engines
        began."""
        samples = self._maker.make(self._next_id, request, compiled, resumed)
        for sample in samples:
            self.worker.scheduler.add(sample.request)
            self._samples[sample.request.id] = sample
        self._next_id += request.params.n
        return samples

    def check_prompt(self, prompt: Prompt) -> list[int]:
        return self._maker.check_prompt(prompt)

    def abort(self, sample: Sample) -> None:
        """Between two steps, or in the worker's `take_in`. What it held is free then, or when a forward ahead ends."""
        if sample.finish_reason is None:
            self.worker.abort(sample.request)
            self._finish(sample, FinishReason.ABORT)

    def revise(self, sample: Sample, max_nodes: int | None) -> None:
        sample.request.max_nodes = max_nodes
        if max_nodes == 0:
            self.worker.drafter.close(sample.request)

    def abort_all(self) -> None:
        for sample in list(self._samples.values()):
            self.abort(sample)

    @property
    def busy(self) -> bool:
        return self.worker.busy

    def step(self) -> list[Delta]:
        return [*self.advance().values()]

    def advance(self) -> dict[Sample, Delta]:
        """One forward. If it fails (EngineError) or is interrupted, its samples end as aborted and waiting ones stay.
        After a RankLost no other step succeeds. A sample with non-finite logits ends alone, with its `error`."""
        try:
            return self._delivered(self.worker.step())
        except BaseException as error:
            for sample in list(self._samples.values()):
                if sample.request.finish_reason is not None:
                    self._finish(sample, FinishReason.ABORT)
            if not isinstance(error, Exception) or isinstance(error, RankLost):
                raise
            raise EngineError(f"step failed: {type(error).__name__}: {error}") from error

    def _delivered(self, commits: Sequence[RequestCommit]) -> dict[Sample, Delta]:
        if (record := self.worker.last_step) is None:
            return {}
        if self.shadows is not None:
            self.shadows.observe(record)
        told = [commit for commit in commits if commit.request.id in self._samples]  # others were aborted since
        try:
            return dict(self._deliver(commit, record.began) for commit in told)
        except BaseException:
            for commit in told:  # or it would go on without these tokens
                self.worker.abort(commit.request)
            raise

    def _deliver(self, commit: RequestCommit, at: float) -> tuple[Sample, Delta]:
        sample = self._samples[commit.request.id]
        sample.read(commit.tokens)
        if commit.request.finish_reason is not None:
            self._finish(sample, commit.request.finish_reason)
        return sample, sample.add(commit, at)

    def _finish(self, sample: Sample, reason: FinishReason) -> None:
        sample.finish(reason)
        if self.shadows is not None:
            self.shadows.ended(sample.request)
        del self._samples[sample.request.id]

    def refuse_lost_rank(self) -> None:
        if self.ranks is not None:
            self.ranks.refuse_lost()

    def check(self) -> None:
        """EngineError if a KV slot is neither free nor owned by a running request."""
        self.worker.check()


def make_tiers(config: EngineConfig, executor: TorchExecutor) -> KVTiers | None:
    """ParameterError for an unusable directory, for tiers too small, and for any if every layer has a window: there
    requests give back slots that tiers would have to load first."""
    if not config.kv_host_memory and config.kv_disk is None:
        return None
    if common_window(executor.model.config):
        field = "kv_disk" if config.kv_disk is not None else "kv_host_memory"
        raise ParameterError(field, getattr(config, field), "none for a model whose layers all have sliding windows")
    copier = copier_of(executor.kv)
    least = math.ceil(executor.context / OBJECT_TOKENS) * copier.object_bytes
    shape, memory, disk = kv_fingerprint(config, executor), 0, None
    if config.kv_host_memory:
        memory = _bytes("kv_host_memory", config.kv_host_memory, least, executor.context)
    if config.kv_disk is not None:
        size = _bytes("kv_disk_size", config.kv_disk_size or DISK_SIZE, least, executor.context)
        disk = DiskStore(config.kv_disk, size, ObjectFormat(shape, copier.object_bytes))
    return KVTiers(copier, executor.num_slots, shape, HostStore(memory, copier.object_bytes), disk)


def _bytes(field: str, given: float, least: int, context: int) -> int:
    size = round(given * GIB)
    if size < least:
        needed = math.ceil(1000 * least / GIB) / 1000
        raise ParameterError(field, given, f"at least {needed:g} GiB: a sequence of {context} tokens takes that")
    return size
