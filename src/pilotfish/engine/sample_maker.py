import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from pilotfish.core.sampling.logit_rules import check_token_ids
from pilotfish.core.sampling.noise import DRAWN_SEED_BITS, sample_seed
from pilotfish.core.sampling.sampling_params import plain
from pilotfish.core.scheduling.request import Request, check_cache_salt
from pilotfish.engine.sample import Sample, TextStream, check_resumed
from pilotfish.errors import ParameterError, PromptError
from pilotfish.grammar.compile import Grammars
from pilotfish.grammar.state import MatcherState
from pilotfish.model.loading.loader import LoadedModel
from pilotfish.options import is_text
from pilotfish.wire.serving import EngineRequest, PartialOutput

Prompt = str | Sequence[int] | NDArray[np.integer]


class SampleMaker:
    def __init__(self, tokenizer: Any, model: LoadedModel, grammars: Grammars) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._grammars = grammars

    def make(
        self,
        first: int,
        request: EngineRequest,
        compiled: LLMatcher | None,
        resumed: Sequence[PartialOutput] | None,
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
