import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from pilotfish.core.sampling.logit_rules import check_token_ids
from pilotfish.core.sampling.noise import DRAWN_SEED_BITS, sample_seed
from pilotfish.core.sampling.sampling_params import SamplingParams, plain
from pilotfish.core.scheduling.executor import TokenLogprobs
from pilotfish.core.scheduling.request import FinishReason, Request, check_cache_salt
from pilotfish.core.scheduling.step import RequestCommit
from pilotfish.engine.token_table import TextStream
from pilotfish.errors import EngineError, InputError, ParameterError, PromptError
from pilotfish.grammar.compile import Grammars
from pilotfish.grammar.state import MatcherState
from pilotfish.model.loading.loader import LoadedModel
from pilotfish.options import is_text
from pilotfish.wire.serving import Delta, EngineRequest, Finish, PartialOutput, Verified

Prompt = str | Sequence[int] | NDArray[np.integer]


class Sample:
    """Times are seconds of `perf_counter`."""

    def __init__(self, index: int, request: Request, text: TextStream) -> None:
        self.index = index
        self.request_id = request.group  # one for all samples of a prompt; a server sets its own
        self.owner: Any = None  # whose it is, to whoever submitted it
        self.request = request
        self.stream = text
        self.started = time.perf_counter()
        self.seconds = 0.0  # from submission to the last token
        self.told_handovers = 0  # how many deltas told of
        self.resumed = False  # and has no tokens of its own yet
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []  # of every prompt token but the first
        self.finish_reason: FinishReason | None = None

    def resume(self, output: PartialOutput) -> None:
        """ParameterError if it has ended."""
        self.token_ids = self.request.extend(output.tokens)
        if self.request.finish_reason is not None:
            found = f"output {output.index} of {len(output.tokens)} tokens"
            raise ParameterError("resumed", found, f"one that has not ended: this ends at token {len(self.token_ids)}")
        self.read(self.token_ids)
        self.request.num_scored = output.scored
        self.resumed = bool(output.tokens)
        self.stream.take()
        self.stream.take_ends()

    def read(self, tokens: Sequence[int]) -> None:
        """Into text, where the request did not look for stop strings in it as it got them."""
        if self.request.stop_detector is None:
            for token in tokens:
                self.stream.add(token)

    @property
    def queued(self) -> float | None:
        """Seconds from submission to the first step that had rows of it."""
        return None if self.request.admitted is None else self.request.admitted - self.started

    def add(self, commit: RequestCommit, at: float) -> Delta:
        tokens = commit.tokens
        first = bool(tokens) and not self.token_ids  # while a prompt is scored there are none yet
        self.token_ids.extend(tokens)
        self.logprobs.extend(commit.logprobs)
        self.prompt_logprobs.extend(commit.prompt_logprobs)
        handovers = self.request.stats.handovers[self.told_handovers :]
        self.told_handovers += len(handovers)
        return Delta(
            id=self.request_id,
            index=self.index,
            tokens=tokens,
            text=self.stream.take(),
            ends=self.stream.take_ends(),
            verified=[self._verified(commit, at)] if tokens else [],
            logprobs=list(commit.logprobs),
            prompt_logprobs=list(commit.prompt_logprobs),
            seed=self.request.seed if first else None,
            queued=self.queued if first else None,
            cached=dict(self.request.stats.cached_by_tier) if first else {},
            handovers=handovers,
            finish=None if self.finish_reason is None else Finish(self.finish_reason, self.stop),
        )

    def _verified(self, commit: RequestCommit, at: float) -> Verified:
        resumed, self.resumed = self.resumed, False
        counts = (len(commit.tokens), commit.nodes, commit.accepted)
        return Verified(at, *counts, commit.origins, resumed, commit.depth, commit.late, commit.sharing)

    def finish(self, reason: FinishReason) -> None:
        self.stream.finish()
        self.finish_reason = reason
        self.seconds = time.perf_counter() - self.started

    @property
    def text(self) -> str:
        return self.stream.text

    @property
    def stop(self) -> str | int | None:
        if self.finish_reason is not FinishReason.STOP or self.stream.stop is not None:
            return self.stream.stop
        return self.token_ids[-1] if self.token_ids[-1] in self.request.params.stop_token_ids else None

    @property
    def error(self) -> EngineError | InputError | None:
        if self.finish_reason is not FinishReason.ERROR:
            return None
        length, grammar = len(self.request.tokens), self.request.grammar
        if grammar is not None and grammar.problem is not None:
            message = f"structured_outputs: after token {length}: {grammar.problem}"
            return ParameterError.described("structured_outputs", message)
        other = "" if grammar is None else ", or grammar and parameters together leave no token"
        reason = f"those after token {length} are not finite (NaN or infinity){other}; none can be sampled"
        return EngineError(f"logits: {reason}")

    def stats(self) -> dict[str, Any]:
        stats, tokens = self.request.stats, len(self.token_ids)
        return {
            "seconds": self.seconds,
            "tokens_per_second": tokens / self.seconds if self.seconds else 0.0,
            "verify_steps": stats.verify_steps,
            "draft_tokens": stats.draft_tokens,
            "accepted_tokens": stats.accepted_tokens,
            "accepted_by_origin": dict(stats.accepted_by_origin),
            "hits": stats.hits,
            "cached_by_tier": dict(stats.cached_by_tier),
            "handovers": [report.as_json() for report in stats.handovers],
            "tokens_per_verify_step": tokens / stats.verify_steps if stats.verify_steps else 0.0,
        }


def check_resumed(outputs: Sequence[PartialOutput], params: SamplingParams, vocab_size: int) -> None:
    indices = [output.index for output in outputs]
    if not indices or len(set(indices)) < len(indices) or max(indices) >= params.n:
        raise ParameterError("resumed", indices, f"different outputs of 0 to {params.n - 1}")
    if params.seed is None:
        raise ParameterError("seed", None, "the seed of the outputs that are resumed")
    for token in (token for output in outputs for token in output.tokens):
        if not 0 <= token < vocab_size:
            raise ParameterError("resumed", token, f"token ids 0 to {vocab_size - 1}")


class SampleMaker:
    def __init__(self, tokenizer: Any, model: LoadedModel, grammars: Grammars) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._grammars = grammars

    def make(
        self, first: int, request: EngineRequest, compiled: LLMatcher | None, resumed: Sequence[PartialOutput] | None
    ) -> list[Sample]:
        params = request.params
        check_cache_salt(request.cache_salt)
        tokens = self.check_prompt(request.tokens)
        eos_ids = frozenset[int]() if params.ignore_eos else self._model.generation.eos_ids
        stop_ids = eos_ids.union(params.stop_token_ids)
        bad_texts = (text for word in params.bad_words for text in (word, f" {word}"))
        encoded = (self._tokenizer.encode(text, add_special_tokens=False) for text in bad_texts)
        bad_sequences = [ids for ids in encoded if ids]
        check_token_ids(params, stop_ids, bad_sequences, self._model.config.vocab_size)
        outputs = [PartialOutput(index) for index in range(params.n)] if resumed is None else resumed
        if resumed is not None:
            check_resumed(resumed, params, self._model.config.vocab_size)
        seed = secrets.randbits(DRAWN_SEED_BITS) if params.seed is None else params.seed
        room = self._model.config.context - len(tokens)
        samples = []
        for output in outputs:
            index = output.index
            own = params if index == 0 else replace(params, prompt_logprobs=None)  # they are the same for all
            own_seed, text = sample_seed(seed, index), TextStream(self._tokenizer, params, stop_ids, tokens)
            grammar = None
            if (asked := params.structured_outputs) is not None:
                grammar = MatcherState(compiled or self._grammars.compile(asked), asked.after, asked.opening)
            sequence = Request(
                first + index,
                tokens,
                own,
                own_seed,
                stop_ids,
                room,
                bad_sequences=bad_sequences,
                cache_salt=request.cache_salt,
                max_nodes=request.max_nodes,
                stop_detector=text.add if own.stop else None,
                group=first,
                grammar=grammar,
                draft=request.draft,
            )
            samples.append(Sample(index, sequence, text))
            samples[-1].resume(output)
        return samples

    def check_prompt(self, prompt: Prompt) -> list[int]:
        """PromptError or ParameterError for a prompt that cannot be served."""
        if isinstance(prompt, str) and not is_text(prompt):
            raise PromptError("prompt: it holds half a surrogate pair; text that UTF-8 can write is needed")
        tokens: list[Any] = self._tokenizer.encode(prompt) if isinstance(prompt, str) else [plain(t) for t in prompt]
        if not tokens:
            raise PromptError("prompt: it is empty; at least one token is needed")
        context, vocab_size = self._model.config.context, self._model.config.vocab_size
        if len(tokens) >= context:
            raise PromptError(f"prompt: {len(tokens)} tokens; the model's context allows {context - 1} and one to come")
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise ParameterError("prompt", token, f"token ids 0 to {vocab_size - 1}")
        return tokens
