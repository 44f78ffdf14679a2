"""The offline interface: prompts in, finished outputs back."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pilotfish.config.engine import EngineConfig
from pilotfish.conversation import FunctionTool, Message, template_messages, template_tools
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import TokenLogprobs
from pilotfish.engine.engine import Engine
from pilotfish.engine.pairs.directories import model_directory
from pilotfish.engine.sample import Prompt, Sample
from pilotfish.errors import EngineError, InputError, ParameterError
from pilotfish.prompts import chat_prompt, read_chat_template, template_arguments
from pilotfish.validation import converted

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Completion:
    index: int
    token_ids: list[int]
    text: str
    finish_reason: str  # stop, length or abort
    seed: int
    stats: dict[str, Any]
    logprobs: list[TokenLogprobs] | None  # one a token, where `SamplingParams.logprobs` asks for them


@dataclass(frozen=True)
class RequestOutput:
    prompt_token_ids: list[int]
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprobs] | None  # of every prompt token but the first, where asked for


class LLM:
    """A target, maybe with a draft that speculates for it.

    >>> llm = LLM(target, draft=draft)
    >>> llm.generate(["def main():"], SamplingParams(temperature=0.0))[0].outputs[0].text

    `target` and `draft` are model directories, GGUF files, or names that `pilotfish models get` knows.
    `config` takes the fields of `EngineConfig`; with a draft the mode is sync unless it says otherwise.
    """

    def __init__(self, target: str | Path, draft: str | Path | None = None, **config: Any) -> None:
        config.setdefault("mode", "off" if draft is None else "sync")
        own = None if draft is None else model_directory("draft", Path(draft))
        self.engine = Engine(EngineConfig(target=model_directory("target", Path(target)), draft=own, **config))

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Run all prompts, batched, to their end. `params`: one for all, or one for each prompt; None takes
        what the model's generation_config.json says.

        A prompt is text, or token ids as a list or a numpy array. An input that cannot be served raises a
        ValueError subclass before anything runs. An error in a step, or an interrupt, ends all requests of the call.
        Where the logits of a prompt are not finite EngineError names the first one, after the others have ended.
        The suffix drafter guesses from past outputs of calls with the same `cache_salt`; without one from none.
        """
        batch = _prompt_list(prompts)
        each = _params_list(self.engine.sampling_params() if params is None else params, len(batch))
        for prompt in batch:
            self.engine.check_prompt(prompt)
        try:
            submitted = [self.engine.submit(prompt, p, cache_salt) for prompt, p in zip(batch, each, strict=True)]
            while self.engine.busy:
                self.engine.step()
        except BaseException:  # an interrupt too: the next call finds no requests
            self.engine.abort_all()
            raise
        for index, error in enumerate(first_error(samples) for samples in submitted):
            if error is not None:
                raise EngineError(f"prompt {index}: {error}") from error
        return [request_output(samples) for samples in submitted]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation, or a list of them, batched, as `generate` continues prompts. Messages and tools are
        those of OpenAI's API. The model's chat template makes the prompt, or `chat_template`: a file, or a template's
        text. The answer begins after the last message; `continue_final_message` continues that instead. An error names
        the field, as messages[0].role, or messages[1][0].role where there are several conversations."""
        tokenizer, own = self.engine.tokenizer, chat_template_kwargs or {}
        template = template_arguments(tokenizer, own, begins=add_generation_prompt, goes_on=continue_final_message)
        template |= template_tools(converted("tools", tools or [], list[FunctionTool]))
        if chat_template is not None:
            template["chat_template"] = read_chat_template(chat_template)
        prompts = [chat_prompt(one, tokenizer, template) for one in _conversations(messages)]
        return self.generate(prompts, sampling_params, cache_salt)


def first_error(samples: Sequence[Sample]) -> EngineError | InputError | None:
    return next((sample.error for sample in samples if sample.error is not None), None)


def _prompt_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    batch: list[Any] = list(prompts)
    return [batch] if any(isinstance(p, int | float | np.number | np.bool_) for p in batch) else batch


def _conversations(given: Any) -> list[list[dict[str, Any]]]:
    several = isinstance(given, list | tuple) and all(isinstance(one, list | tuple) for one in given)
    by_path = {f"messages[{i}]": one for i, one in enumerate(given)} if several else {"messages": given}
    return [template_messages(path, converted(path, one, list[Message])) for path, one in by_path.items()]


def _params_list(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise ParameterError("params", len(params), f"one for all, or one for each of {count} prompts")
    return list(params)


def request_output(samples: Sequence[Sample]) -> RequestOutput:
    first = samples[0].request
    prompt_logprobs = None if first.params.prompt_logprobs is None else samples[0].prompt_logprobs
    return RequestOutput(first.tokens[: first.num_prompt_tokens], [_completion(s) for s in samples], prompt_logprobs)


def _completion(sample: Sample) -> Completion:
    return Completion(
        index=sample.index,
        token_ids=sample.token_ids,
        text=sample.text,
        finish_reason=str(sample.finish_reason),
        seed=sample.request.seed,
        stats=sample.stats(),
        logprobs=None if sample.request.params.logprobs is None else sample.logprobs,
    )
