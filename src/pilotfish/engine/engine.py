"""The engine: submits requests to the target worker and turns what it commits into text."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray

from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import DrafterKind
from pilotfish.core.budget import Budget
from pilotfish.core.constraint import Constraint, GrammarState
from pilotfish.core.drafter import CombinedDrafter, Drafter, NoDrafter
from pilotfish.core.executor import Executor
from pilotfish.core.logit_rules import check_token_ids
from pilotfish.core.messages import FeatureOffer
from pilotfish.core.noise import DRAWN_SEED_BITS, sample_seed
from pilotfish.core.prefix_cache import PrefixCache
from pilotfish.core.request import FinishReason, Request, check_cache_salt
from pilotfish.core.sampling_params import SamplingParams, plain
from pilotfish.core.scheduler import Scheduler
from pilotfish.core.slots import SlotPool
from pilotfish.core.step import RequestCommit
from pilotfish.core.vocabulary import added_tokens
from pilotfish.draft.lm import LMDrafter
from pilotfish.draft.ngram import NgramDrafter
from pilotfish.draft.suffix import ResponseCache, SuffixDrafter
from pilotfish.engine.costs import make_budget
from pilotfish.engine.handovers import HandOvers
from pilotfish.engine.heads import choose_layers, read_head_of_features, sharing
from pilotfish.engine.host_memory import divided
from pilotfish.engine.kv_identity import kv_identity
from pilotfish.engine.kv_tiers import make_tiers
from pilotfish.engine.members import MembersFile
from pilotfish.engine.memory import device_of, load_configured, plan_memory, precision_here, refuse_unequal_tokenizers
from pilotfish.engine.pool_members import FollowedMembers
from pilotfish.engine.ranks import Ranks, cores_here
from pilotfish.engine.remote_drafts import RemoteDrafter, RemoteDrafts
from pilotfish.engine.remote_prefills import RemotePrefills
from pilotfish.engine.sample import Sample, TextStream, check_resumed
from pilotfish.engine.tapping import with_features
from pilotfish.errors import EngineError, ParameterError, PromptError, RankLost
from pilotfish.grammar.compile import Grammars
from pilotfish.grammar.state import MatcherState
from pilotfish.grammar.threads import GrammarThreads
from pilotfish.heads.executor import make_head_executor
from pilotfish.heads.spec import HeadFiles
from pilotfish.heads.tap import feature_tap
from pilotfish.kv.tiers import KVTiers
from pilotfish.model.collective import ProcessGroup
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.feature_tap import FeatureTap
from pilotfish.model.features import common_window
from pilotfish.model.kv_copy import copier_of, layout_of
from pilotfish.model.loader import LoadedModel
from pilotfish.model.metadata import load_tokenizer
from pilotfish.model.pacer import Pacer
from pilotfish.model.shards import Shard
from pilotfish.observe.records import Timeline, merge, part_of
from pilotfish.openmp import warn_of_spinning
from pilotfish.options import is_text
from pilotfish.plan.pace import Pace
from pilotfish.target.worker import GuardedDrafter, TargetWorker
from pilotfish.wire.serving import Delta, PartialOutput

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | NDArray[np.integer]


@dataclass(frozen=True)
class Addition:
    """What a step has added to a sample."""

    sample: Sample
    delta: Delta


class Engine:
    """A target in this process, maybe with drafts. `submit`, then `step` while it is `busy`."""

    draft_executor: TorchExecutor  # of a draft model in this process, if there is one
    _head: HeadFiles | None = None  # until its executor is made
    tiers: KVTiers | None = None
    ranks: Ranks | None = None
    grammars: GrammarThreads | None = None
    _members: FollowedMembers | None = None

    def __init__(
        self,
        config: EngineConfig,
        drafter: Drafter | None = None,
        remote: RemoteDrafts | None = None,
        prefills: RemotePrefills | None = None,
    ) -> None:
        """`drafter` replaces the one that `config` describes. `remote` are the drafts of `config`, `prefills` its
        prefill workers, if they were started already; the engine closes them."""
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
        self.executor = self._load_target(heads)
        self.model = self.executor.model
        if not self.model.native:
            warn_of_spinning()
        vocab_size, eos_ids = self.model.config.vocab_size, sorted(self.model.generation.eos_ids)
        self.grammars = GrammarThreads(Grammars(self.tokenizer, vocab_size, eos_ids))
        self.drafter = drafter or self.make_drafter(() if config.mode == "off" else config.drafters)
        pool = SlotPool(self.memory.slots, common_window(self.model.config))
        budget = make_budget(config, self.executor, self.drafter)
        tiers = self.tiers = make_tiers(config, self.executor)
        cache = PrefixCache(pool, dropped=None if tiers is None else tiers.dropped) if config.prefix_cache else None
        handovers = self._connect_prefills()
        scheduler = Scheduler(pool, config.max_rows, config.max_requests, cache, tiers, handovers)
        self.worker = TargetWorker(self.executor, scheduler, self.drafter, budget, masks=self.grammars.masks)
        self.reset_pacing()  # what was measured at start is no part of a run
        if config.trace is not None:
            self._timeline = Timeline(part_of(config.trace, "target"), "target")
            self.worker.observe = self._timeline.step

    def _load_target(self, heads: list[HeadFiles]) -> TorchExecutor:
        """All of it, or rank 0's shard once the other ranks have theirs. `heads` is one, maybe read in several ways,
        that it is to make features for."""
        config, ranks, slots = self.config, self.ranks, self.memory.slots
        pacer = self._pacer("target", config.paces.target)
        if ranks is None:
            model = load_configured(config, config.target, config.max_model_len)
            return TorchExecutor(model, slots, pacer, tap=self._tap(heads, model))
        group = ProcessGroup(Shard(0, config.tensor_parallel), device_of(config))
        model = load_configured(config, config.target, config.max_model_len, group)
        ranks.begin(slots)
        group.connect(ranks.meeting)
        return TorchExecutor(model, slots, pacer, together=ranks.together, tap=self._tap(heads, model))

    def _tap(self, heads: list[HeadFiles], model: LoadedModel) -> FeatureTap | None:
        if not heads:
            return None
        files = choose_layers(heads, model, self.tokenizer)
        self._head = files if self.config.mode == "sync" else None
        return feature_tap(files, model.device, model.dtype, eager=self.config.eager)

    def _connect_prefills(self) -> HandOvers | None:
        """ParameterError where every layer has a window: there requests give back what would be handed over."""
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
        return self.prefills.connect(identity, layout_of(kv), copier_of(kv))

    def _place(self) -> frozenset[int]:
        """Pin this process until `close`, if the configuration or the workers ask for that; return the cores."""
        cores = self.config.core_set if self.remote is None else self.remote.cores
        if self.prefills is not None:
            cores = self.prefills.cores or cores
        if self.config.tensor_parallel > 1:
            self.ranks = Ranks(self.config, cores or cores_here())
            cores = self.ranks.cores
        if cores:
            os.sched_setaffinity(0, cores)
        return cores

    def close(self) -> None:
        """End every sample, ranks and workers. Idempotent; also done when the process ends."""
        self.abort_all()
        if self._members is not None:
            self._members.close()
        if self.ranks is not None:
            self.ranks.close()
        if self.prefills is not None:
            self.prefills.close()
        if self.remote is not None:
            self.remote.close()
        if self.grammars is not None:
            self.grammars.close()
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

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def make_drafter(self, kinds: Sequence[DrafterKind]) -> Drafter:
        """A new drafter of these kinds, together."""
        if not kinds:
            return NoDrafter()
        config = self.config
        makers: dict[DrafterKind, Callable[[], Drafter]] = {
            "lm": self.make_lm_drafter if config.mode == "sync" else self._make_remote_drafter,
            "ngram": lambda: NgramDrafter(config.ngram_max, config.ngram_min),
            "suffix": lambda: SuffixDrafter(ResponseCache(config.max_cached_tokens)),
        }
        drafters = [makers[kind]() for kind in kinds]
        return drafters[0] if len(drafters) == 1 else CombinedDrafter(drafters)

    def make_lm_drafter(self, width: int = 0, children: int = 4) -> LMDrafter:
        """A new one over the draft in this process. Its levels have `width` rows, 0: as configured, of which each gets
        `children`. All of one engine write into the same slots: while one has sessions, or a prefix cache, it is the
        only one in use."""
        return self._lm_drafter(width or self.config.width, children)

    @cached_property
    def _lm_drafter(self) -> Callable[[int, int], LMDrafter]:
        """Over the draft, which is loaded into this process at the first call."""
        assert self.grammars is not None  # since the target was loaded
        load = self._load_head if self._drafts_with_head else self._load_draft
        executor, unshared = load()
        return partial(
            LMDrafter,
            executor,
            unshared=unshared,
            pacer=self._pacer("draft", self.config.paces.draft),
            prefix_cache=self.config.prefix_cache,
            grammars=self.grammars.pending,
            masks=self.grammars.masks,
            source=self.executor if self._drafts_with_head else None,
        )

    @property
    def _drafts_with_head(self) -> bool:
        return self.config.draft is not None and self.config.draft == self.config.features

    def _load_draft(self) -> tuple[Executor, frozenset[int]]:
        """And its tokens that the target lacks."""
        config = self.config
        assert config.draft is not None  # EngineConfig checks it
        refuse_unequal_tokenizers(config.target, config.draft)
        unshared = added_tokens(load_tokenizer(config.draft)).keys() - added_tokens(self.tokenizer).keys()
        loaded, vocab_size = load_configured(config, config.draft), self.model.config.vocab_size
        self.draft_executor = TorchExecutor(loaded, self.memory.slots, vocab_size=vocab_size)
        return self.draft_executor, frozenset(unshared)

    def _load_head(self) -> tuple[Executor, frozenset[int]]:
        """It speaks the target's tokens."""
        assert self._head is not None  # since the target was loaded
        model, slots, files = self.model, self.memory.slots, sharing(self._head, self.model)
        self._head = None
        how: Any = {"eager": self.config.eager, "vocab_size": model.config.vocab_size}
        return make_head_executor(files, model.device, model.dtype, slots, **how), frozenset()

    def _make_remote_drafter(self) -> RemoteDrafter:
        config = self.config
        if config.draft is not None and config.starts_drafts and not self._drafts_with_head:
            refuse_unequal_tokenizers(config.target, config.draft)
        assert self.remote is not None  # as in every mode async
        vocab_size, tap = self.model.config.vocab_size, self.executor.tap
        if tap is None:
            return self.remote.connect(self.tokenizer, vocab_size)
        offer = FeatureOffer(tap.digest, tap.width, config.feature_dtype)
        return self.remote.connect(self.tokenizer, vocab_size, self.executor, offer)

    def _pacer(self, role: str, pace: Pace | None) -> Pacer | None:
        if pace is None:
            return None
        self._pacers.append(Pacer(role, pace))
        return self._pacers[-1]

    def drops(self) -> dict[str, dict[str, int]]:
        """Messages of each draft pool that were dropped so far, by reason."""
        return {} if self.remote is None else {pool.name: pool.drops.occurred for pool in self.remote.pools}

    def pacing(self) -> list[Pacer]:
        """How well the paced models of this process kept their pace since `reset_pacing`; the target first."""
        return self._pacers

    def reset_pacing(self) -> None:
        for pacer in self._pacers:
            pacer.reset()

    def use(self, drafter: Drafter, budget: Budget) -> None:
        """Attach another drafter and budget; EngineError while requests run."""
        if self.busy:
            raise EngineError("the drafter cannot be swapped while requests run")
        self.drafter = drafter
        self.worker.drafter = GuardedDrafter(drafter, self.model.config.vocab_size)
        self.worker.budget = budget

    # -- requests

    def sampling_params(self, **given: Any) -> SamplingParams:
        """Parameters of a request: those given, then those of the model's generation_config.json."""
        return SamplingParams(**{**self.model.generation.defaults, **given})

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        cache_salt: str | None = None,
        max_nodes: int | None = None,
        compiled: LLMatcher | None = None,
        resumed: Sequence[PartialOutput] | None = None,
    ) -> list[Sample]:
        """Queue `params.n` samples of a prompt. PromptError or ParameterError affect nothing else. Drafts for requests
        of one `cache_salt`, 1 to 256 characters, may draw on each other's outputs. A step verifies at most `max_nodes`
        nodes of a sample's tree; 0 turns speculation off. `compiled` is the grammar of the parameters' constraint, if
        that was compiled already. `resumed` are the only samples to queue, which go on exactly where another engine
        over the same model left them: they stand as after a preemption."""
        check_cache_salt(cache_salt)
        tokens = self.check_prompt(prompt)
        eos_ids = frozenset[int]() if params.ignore_eos else self.model.generation.eos_ids
        stop_ids = eos_ids.union(params.stop_token_ids)
        bad_sequences = self._sequences_of(params.bad_words)
        check_token_ids(params, stop_ids, bad_sequences, self.model.config.vocab_size)
        outputs = [PartialOutput(index) for index in range(params.n)] if resumed is None else resumed
        if resumed is not None:
            check_resumed(resumed, params, self.model.config.vocab_size)
        seed = secrets.randbits(DRAWN_SEED_BITS) if params.seed is None else params.seed
        room = self.model.config.context - len(tokens)
        samples, first = [], self._next_id
        for output in outputs:
            index = output.index
            own = params if index == 0 else replace(params, prompt_logprobs=None)  # they are the same for all
            own_seed, text = sample_seed(seed, index), TextStream(self.tokenizer, params, stop_ids, tokens)
            grammar = None if params.structured_outputs is None else self._grammar(params.structured_outputs, compiled)
            limits = (bad_sequences, cache_salt, max_nodes, text, first, grammar)
            request = Request(first + index, tokens, own, own_seed, stop_ids, room, *limits)
            samples.append(Sample(index, request, text))
            samples[-1].resume(output)
        for sample in samples:  # none, if one of them cannot go on
            self.worker.scheduler.add(sample.request)
            self._samples[sample.request.id] = sample
        self._next_id += params.n
        return samples

    def _grammar(self, constraint: Constraint, compiled: LLMatcher | None) -> GrammarState:
        assert self.grammars is not None  # since the target was loaded
        matcher = compiled or self.grammars.grammars.compile(constraint)
        return MatcherState(matcher, constraint.after, constraint.opening)

    def _sequences_of(self, words: Sequence[str]) -> list[list[int]]:
        """Token ids of each word at a text's beginning and after a space."""
        texts = (text for word in words for text in (word, f" {word}"))
        return [ids for text in texts if (ids := self.tokenizer.encode(text, add_special_tokens=False))]

    def check_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt that can be served; PromptError or ParameterError otherwise."""
        if isinstance(prompt, str) and not is_text(prompt):
            raise PromptError("prompt: it holds half a surrogate pair; text that UTF-8 can write is needed")
        tokens: list[Any] = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [plain(t) for t in prompt]
        if not tokens:
            raise PromptError("prompt: it is empty; at least one token is needed")
        context, vocab_size = self.model.config.context, self.model.config.vocab_size
        if len(tokens) >= context:
            raise PromptError(f"prompt: {len(tokens)} tokens; the model's context allows {context - 1} and one to come")
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise ParameterError("prompt", token, f"token ids 0 to {vocab_size - 1}")
        return tokens

    def abort(self, sample: Sample) -> None:
        """End a sample between two steps; what it held is free when this returns."""
        if sample.finish_reason is None:
            self.worker.abort(sample.request)
            self._finish(sample, FinishReason.ABORT)

    def abort_all(self) -> None:
        for sample in list(self._samples.values()):
            self.abort(sample)

    @property
    def busy(self) -> bool:
        return self.worker.scheduler.busy

    def step(self) -> list[Delta]:
        """`advance`, for whoever has one request, or its ids tell."""
        return [addition.delta for addition in self.advance()]

    def advance(self) -> list[Addition]:
        """Run one forward; return its additions to each sample. If it fails or is interrupted, the samples in it end as
        aborted and those still waiting stay: EngineError, or the interrupt. After a RankLost no other step succeeds. A
        sample whose logits are not finite ends alone, with its `error`."""
        began = time.perf_counter()
        try:
            commits = self.worker.step()
        except BaseException as error:
            for sample in list(self._samples.values()):
                if sample.request.finish_reason is not None:
                    self._finish(sample, FinishReason.ABORT)
            if not isinstance(error, Exception) or isinstance(error, RankLost):
                raise
            raise EngineError(f"step failed: {type(error).__name__}: {error}") from error
        for request in (*self.worker.scheduler.running, *(commit.request for commit in commits)):
            self._samples[request.id].scheduled_at(began)
        record = self.worker.last_step
        return [] if record is None else [self._deliver(commit, record.began) for commit in commits]

    def _deliver(self, commit: RequestCommit, at: float) -> Addition:
        sample = self._samples[commit.request.id]
        if commit.request.finish_reason is not None:
            self._finish(sample, commit.request.finish_reason)
        return Addition(sample, sample.add(commit, at))

    def _finish(self, sample: Sample, reason: FinishReason) -> None:
        sample.finish(reason)
        del self._samples[sample.request.id]

    def refuse_lost_rank(self) -> None:
        """RankLost once one has ended."""
        if self.ranks is not None:
            self.ranks.refuse_lost()

    def check(self) -> None:
        """EngineError if a KV slot is neither free nor owned by a running request. Looks at every slot."""
        self.worker.scheduler.check()
