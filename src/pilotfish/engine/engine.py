"""The engine: submits requests to the target worker and turns what it commits into text."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pilotfish.config import DrafterKind, EngineConfig
from pilotfish.core.budget import AdaptiveBudget, Budget, FixedBudget
from pilotfish.core.drafter import Drafter, NoDrafter
from pilotfish.core.logit_rules import check_token_ids
from pilotfish.core.logprobs import TokenLogprobs
from pilotfish.core.noise import DRAWN_SEED_BITS, sample_seed
from pilotfish.core.plain_values import plain
from pilotfish.core.request import FinishReason, Request, check_cache_salt
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.core.scheduler import Commit, Scheduler
from pilotfish.core.slots import SlotPool
from pilotfish.draft.combined import CombinedDrafter, drafters_of
from pilotfish.draft.lm import LMDrafter, TreeShape
from pilotfish.draft.ngram import NgramDrafter
from pilotfish.draft.responses import ResponseCache
from pilotfish.draft.suffix import SuffixDrafter
from pilotfish.engine.check import refuse_unequal_tokenizers
from pilotfish.engine.costs import forward_seconds, step_costs
from pilotfish.engine.draft_workers import DraftWorkers, start_draft_workers
from pilotfish.engine.memory import device_of, plan_memory
from pilotfish.engine.remote_drafts import RemoteDrafts, target_identity
from pilotfish.engine.text import TextStream
from pilotfish.engine.vocabulary import added_tokens
from pilotfish.errors import EngineError, ParameterError, PromptError
from pilotfish.model.loader import DTYPES, LoadedModel, load_model
from pilotfish.model.pacer import Pacer, Pacing
from pilotfish.model.runner import Runner
from pilotfish.model.tokenizer import load_tokenizer
from pilotfish.observe.records import Timeline, merge, part_of
from pilotfish.openmp import warn_of_spinning
from pilotfish.options import is_text
from pilotfish.plan.pace import Pace
from pilotfish.target.guard import GuardedDrafter
from pilotfish.target.remote import RemoteDrafter
from pilotfish.target.worker import TargetWorker

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | NDArray[np.integer]


@dataclass(frozen=True)
class SampleDelta:
    """A step's commit to one sample, and the text of it."""

    sample: Sample
    commit: Commit
    text: str
    ends: list[int]  # [tokens] characters of the sample's whole text after each token


class Sample:
    """One output of one prompt: its request, its text so far, when it began and ended."""

    def __init__(self, index: int, request: Request, text: TextStream, started: float) -> None:
        self.index = index
        self.request = request
        self.stream = text
        self.started = started
        self.scheduled: float | None = None  # when the first step began that had rows of it
        self.ended: float | None = None
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []  # of every prompt token but the first
        self.finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        return self.stream.text

    @property
    def stop(self) -> str | int | None:
        """The stop string or stop token that ended it; None for anything else."""
        if self.finish_reason is not FinishReason.STOP or self.stream.stop is not None:
            return self.stream.stop
        return self.token_ids[-1] if self.token_ids[-1] in self.request.params.stop_token_ids else None

    @property
    def error(self) -> EngineError | None:
        """Why it ended with an error."""
        if self.finish_reason is not FinishReason.ERROR:
            return None
        length = len(self.request.tokens)
        return EngineError(f"logits: those after token {length} are not finite (NaN or infinity); none can be sampled")

    @property
    def seconds(self) -> float:
        """From submission to the last token."""
        return (self.ended or self.started) - self.started

    def stats(self) -> dict[str, Any]:
        """The counts that `generate --json` reports."""
        stats, tokens = self.request.stats, len(self.token_ids)
        return {
            "seconds": self.seconds,
            "tokens_per_second": tokens / self.seconds if self.seconds else 0.0,
            "verify_steps": stats.verify_steps,
            "draft_tokens": stats.draft_tokens,
            "accepted_tokens": stats.accepted_tokens,
            "accepted_by_origin": dict(stats.accepted_by_origin),
            "hits": stats.hits,
            "tokens_per_verify_step": tokens / stats.verify_steps if stats.verify_steps else 0.0,
        }


class Engine:
    """One process, one target, maybe a draft. `submit`, then `step` until nothing is `busy`."""

    def __init__(
        self, config: EngineConfig, drafter: Drafter | None = None, workers: DraftWorkers | None = None
    ) -> None:
        """`drafter` replaces the one that `config` describes. `workers` are those of `config`, already started; the
        engine ends them."""
        self.config = config
        self.remote: RemoteDrafts | None = None
        self._workers = workers
        self._pacers: list[Pacer] = []
        self._timeline: Timeline | None = None
        self._samples: dict[int, Sample] = {}
        self._next_id = 0
        self._cores_before = os.sched_getaffinity(0)
        try:
            if drafter is None:
                self._workers = workers or start_draft_workers(config)
            self._load(self._place(), drafter)
        except BaseException:
            self.close()
            raise

    def _load(self, cores: frozenset[int], drafter: Drafter | None) -> None:
        config = self.config
        warn_of_spinning()
        torch.set_num_threads(config.threads or len(cores) or config.num_threads)
        self.tokenizer = load_tokenizer(config.target)
        self.memory = plan_memory(config)
        logger.info(self.memory.describe())
        self.model = load(config, config.target, config.max_model_len)
        runner = Runner(self.model, self.memory.slots)
        pacer = self._pacer("target", config.paces.target)
        self.drafter = drafter or self._make_drafter()
        scheduler = Scheduler(SlotPool(self.memory.slots), config.max_rows, config.max_requests)
        budget = make_budget(config, runner, self.drafter, pacer)
        self.worker = TargetWorker(runner, scheduler, self.drafter, budget, pacer)
        self.reset_pacing()  # what was measured at start is no part of a run
        if config.trace is not None:
            self._timeline = Timeline(part_of(config.trace, "target"), "target")
            self.worker.observe = self._timeline.step

    def _place(self) -> frozenset[int]:
        """Pin this process, where a configuration or the draft workers, which load while the target does, ask for that,
        until `close`; the cores."""
        cores = self.config.core_set if self._workers is None else self._workers.placement.target
        if cores:
            os.sched_setaffinity(0, cores)
        return cores

    def close(self) -> None:
        """End every sample, and the draft's processes. Idempotent; also done when the process ends."""
        self.abort_all()
        if self.remote is not None:
            self.remote.close()
        if self._workers is not None:
            self._workers.close()
        if self._timeline is not None and self.config.trace is not None:
            self._timeline.close()
            workers = [part_of(self.config.trace, f"draft {i}") for i in range(self.config.draft_workers)]
            merge([part_of(self.config.trace, "target"), *workers], self.config.trace)
            self._timeline = None
        os.sched_setaffinity(0, self._cores_before)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _make_drafter(self) -> Drafter:
        config = self.config
        if config.mode == "off":
            return NoDrafter()
        makers: dict[DrafterKind, Callable[[], Drafter]] = {
            "lm": self._make_lm_drafter if config.mode == "sync" else self._make_remote_drafter,
            "ngram": lambda: NgramDrafter(config.ngram_max, config.ngram_min),
            "suffix": lambda: SuffixDrafter(ResponseCache(config.max_cached_tokens)),
        }
        drafters = [makers[kind]() for kind in config.drafters]
        return drafters[0] if len(drafters) == 1 else CombinedDrafter(drafters)

    def _make_lm_drafter(self) -> LMDrafter:
        config = self.config
        assert config.draft is not None  # EngineConfig checks it
        refuse_unequal_tokenizers(config.target, config.draft)
        unshared = added_tokens(load_tokenizer(config.draft)).keys() - added_tokens(self.tokenizer).keys()
        pacer = self._pacer("draft", config.paces.draft)
        runner = Runner(load(config, config.draft), self.memory.slots)
        shape = TreeShape(width=config.width)
        return LMDrafter(runner, shape, self.model.shape.vocab_size, pacer, unshared=frozenset(unshared))

    def _make_remote_drafter(self) -> RemoteDrafter:
        config = self.config
        if config.draft is not None and not config.draft_pool:
            refuse_unequal_tokenizers(config.target, config.draft)
        identity = target_identity(config, self.tokenizer, self.model.shape.vocab_size)
        self.remote = RemoteDrafts(config, identity, self._workers)
        return self.remote.drafter

    def _pacer(self, role: str, pace: Pace | None) -> Pacer | None:
        if pace is None:
            return None
        self._pacers.append(Pacer(role, pace))
        return self._pacers[-1]

    def drops(self) -> dict[str, dict[str, int]]:
        """What was dropped of each draft pool's messages so far, by reason (`core/pools.py`)."""
        return {} if self.remote is None else {pool.name: pool.drops.occurred for pool in self.remote.pools}

    def pacing(self) -> list[Pacing]:
        """How the paced models of this process have kept their pace since the start; the target first."""
        return [pacer.pacing() for pacer in self._pacers]

    def reset_pacing(self) -> None:
        """Count overruns from here on."""
        for pacer in self._pacers:
            pacer.reset()

    def use(self, drafter: Drafter, budget: Budget) -> None:
        """Attach another drafter, and decide by another budget; EngineError while requests run."""
        if self.busy:
            raise EngineError("the drafter cannot be swapped while requests run")
        self.drafter = drafter
        self.worker.drafter = GuardedDrafter(drafter, self.model.shape.vocab_size)
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
    ) -> list[Sample]:
        """Queue one prompt; its `params.n` samples. PromptError or ParameterError affect nothing else. Drafts for
        requests of one `cache_salt`, 1 to 256 characters, may draw on each other's outputs. Of a sample's tree a step
        verifies at most `max_nodes` nodes; 0: it does without speculation."""
        check_cache_salt(cache_salt)
        tokens = self.check_prompt(prompt)
        stop_ids = frozenset(params.stop_token_ids) | (
            frozenset() if params.ignore_eos else self.model.generation.eos_ids
        )
        bad_sequences = self._sequences_of(params.bad_words)
        check_token_ids(params, stop_ids, bad_sequences, self.model.shape.vocab_size)
        seed = secrets.randbits(DRAWN_SEED_BITS) if params.seed is None else params.seed
        room = self.model.shape.context - len(tokens)
        samples = []
        for index in range(params.n):
            own = params if index == 0 else replace(params, prompt_logprobs=None)  # they are the same for all
            text = TextStream(self.tokenizer, params, stop_ids, tokens)
            request = Request(
                self._next_id,
                tokens,
                own,
                sample_seed(seed, index),
                stop_ids,
                room,
                bad_sequences,
                cache_salt,
                max_nodes,
                text,
            )
            self.worker.scheduler.add(request)
            self._next_id += 1
            samples.append(Sample(index, request, text, time.perf_counter()))
            self._samples[request.id] = samples[-1]
        return samples

    def _sequences_of(self, words: Sequence[str]) -> list[list[int]]:
        """Token ids of words as they stand at a text's beginning and after a space."""
        texts = (text for word in words for text in (word, f" {word}"))
        return [ids for text in texts if (ids := self.tokenizer.encode(text, add_special_tokens=False))]

    def check_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt that can be served; PromptError or ParameterError otherwise."""
        if isinstance(prompt, str) and not is_text(prompt):
            raise PromptError("prompt: it holds half a surrogate pair; text that UTF-8 can write is needed")
        tokens: list[Any] = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [plain(t) for t in prompt]
        if not tokens:
            raise PromptError("prompt: it is empty; at least one token is needed")
        context = self.model.shape.context
        if len(tokens) >= context:
            raise PromptError(f"prompt: {len(tokens)} tokens; the model's context allows {context - 1} and one to come")
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.model.shape.vocab_size:
                raise ParameterError("prompt", token, f"token ids 0 to {self.model.shape.vocab_size - 1}")
        return tokens

    def abort(self, sample: Sample) -> None:
        """End a sample between two steps; what it held is free when this returns."""
        if sample.finish_reason is None:
            self.worker.abort(sample.request)
            self._finish(sample, FinishReason.ABORT)

    def abort_all(self) -> None:
        """End every sample."""
        for sample in list(self._samples.values()):
            self.abort(sample)

    @property
    def busy(self) -> bool:
        return self.worker.scheduler.busy

    def step(self) -> list[SampleDelta]:
        """One forward; what it added to each sample. EngineError when it fails: the samples that were in
        it end as aborted, those still waiting stay. An interrupt in the forward does the same. A sample whose logits
        are not finite ends alone, with its `error`."""
        began = time.perf_counter()
        try:
            commits = self.worker.step()
        except BaseException as error:
            for sample in list(self._samples.values()):
                if sample.request.finish_reason is not None:
                    self._finish(sample, FinishReason.ABORT)
            if not isinstance(error, Exception):
                raise
            raise EngineError(f"step failed: {type(error).__name__}: {error}") from error
        for request in self.worker.scheduler.running:
            self._note_scheduled(request, began)
        return [self._deliver(commit, began) for commit in commits]

    def _note_scheduled(self, request: Request, began: float) -> None:
        sample = self._samples[request.id]
        sample.scheduled = began if sample.scheduled is None else sample.scheduled

    def _deliver(self, commit: Commit, began: float) -> SampleDelta:
        self._note_scheduled(commit.request, began)
        sample = self._samples[commit.request.id]
        sample.token_ids.extend(commit.tokens)
        sample.logprobs.extend(commit.logprobs)
        sample.prompt_logprobs.extend(commit.prompt_logprobs)
        if commit.request.finish_reason is not None:
            self._finish(sample, commit.request.finish_reason)
        return SampleDelta(sample, commit, sample.stream.take(), sample.stream.take_ends())

    def _finish(self, sample: Sample, reason: FinishReason) -> None:
        sample.stream.finish()
        sample.finish_reason = reason
        sample.ended = time.perf_counter()
        del self._samples[sample.request.id]


def load(config: EngineConfig, directory: Path, max_model_len: int = 0) -> LoadedModel:
    """Load one of the configured models on the configured device."""
    dtype, device, quantization = DTYPES[config.dtype], device_of(config), config.quantization
    return load_model(
        directory, dtype, device, eager=config.eager, quantization=quantization, max_model_len=max_model_len
    )


def make_budget(config: EngineConfig, runner: Runner, drafter: Drafter, pacer: Pacer | None = None) -> Budget:
    """The budget that `config` describes; `pacer` is the target's. An adaptive one has the runners' forwards measured:
    only while idle."""
    if isinstance(drafter, NoDrafter) or config.budget == "fixed":
        return FixedBudget(config.nodes, config.levels)
    lm = next((d for d in drafters_of(drafter) if isinstance(d, LMDrafter)), None)
    level_seconds = 0.0 if lm is None else forward_seconds(lm.runner, config.width, lm.pacer)
    costs = step_costs(runner, config, pacer)
    if (saved := 2 * costs.at(1) - costs.at(2)) < level_seconds:
        reason = "a draft forward takes %.2f ms and saves %.2f ms of the target at best: it will mostly rest"
        logger.warning(reason, 1000 * level_seconds, 1000 * saved)
    return AdaptiveBudget(config.nodes, config.levels, costs, level_seconds)
