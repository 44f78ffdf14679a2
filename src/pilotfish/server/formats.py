"""The bodies of answers: a completion's and a chat's, each whole or as the chunks of a stream, and their
log-probabilities."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace
from transformers.convert_slow_tokenizer import bytes_to_unicode

from pilotfish.core.executor import TokenLogprobs
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.engine.sample import TextStream
from pilotfish.server import responses
from pilotfish.server.params import Generation, TokenizedPrompt
from pilotfish.server.requests import StreamOptions
from pilotfish.server.responses import BaseAnswer, PromptLogprobs
from pilotfish.server.stream import OutputBuffer
from pilotfish.wire.serving import Verified

LEAST = -9999.0  # stands for minus infinity, which JSON does not know
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
#: A token's name in log-probabilities, and its bytes.
TokenNames = Callable[[int], tuple[str, list[int]]]


class AnswerFormat:
    """The body of an answer, whole or as the chunks of a stream. Subclasses make its choices."""

    answer: type[BaseAnswer]
    chunk: type[BaseAnswer]

    def __init__(self, generation: Generation, tokenizer: Any, token_text: TokenNames) -> None:
        self.generation, self.tokenizer, self.token_text = generation, tokenizer, token_text
        n, prompts = generation.params.n, generation.prompts
        self.outputs = [OutputBuffer(i, prompts[i // n]) for i in range(len(prompts) * n)]
        self.body, self.head = generation.body, generation.head
        self.options = self.body.stream_options or StreamOptions()
        self.detailed = self.body.detail
        self.names: TokenNames = token_text
        if self.body.return_tokens_as_token_ids:
            self.names = lambda token: (f"token_id:{token}", token_text(token)[1])

    def whole(self) -> BaseAnswer:
        """The answer, once all outputs have finished."""
        choices = [self.choice(output) for output in self.outputs]
        seed = self.seed(self.outputs[0])
        return self.answer(**self.head, choices=choices, seed=seed, usage=self.usage(), metrics=self.metrics())

    def choice(self, output: OutputBuffer) -> Struct:
        raise NotImplementedError

    def chunks(self, output: OutputBuffer) -> list[BaseAnswer]:
        """Events of the newest update of an output. Metrics come with the last one of the stream."""
        ended = all(each.finish for each in self.outputs)
        metrics = self.metrics() if ended and not self.options.include_usage else UNSET
        return [self.event(output, self.choice(output), metrics=metrics, pilotfish=self.detail(output))]

    def closing(self) -> BaseAnswer:
        """The event after the last output's, with the usage."""
        return self.chunk(**self.head, choices=[], usage=self.usage(), metrics=self.metrics())

    def event(self, output: OutputBuffer, choice: Struct, **more: Any) -> BaseAnswer:
        seed = self.seed(output) if output.index == 0 else UNSET
        return self.chunk(**self.head, choices=[choice], seed=seed, usage=self.event_usage(), **more)

    def usage(self) -> responses.Usage:
        prompts = sum(len(prompt.tokens) for prompt in self.generation.prompts)
        completions = sum(output.tokens for output in self.outputs)
        cached = responses.PromptTokensDetails(0)  # no KV is kept across requests
        return responses.Usage(prompts, completions, prompts + completions, cached)

    def event_usage(self) -> responses.Usage | UnsetType | None:
        """Null if the closing event will have it, as in OpenAI's API."""
        if self.options.continuous_usage_stats:
            return self.usage()
        return None if self.options.include_usage else UNSET

    def metrics(self) -> responses.Metrics | UnsetType:
        """None for several outputs, as in vLLM."""
        level = self.generation.metrics
        if level == "none":
            return UNSET
        steps = [step for step in self.outputs[0].verified if step.nodes] if len(self.outputs) == 1 else []
        if not steps:
            return responses.Metrics(None)
        origins = Counter(origin for step in steps for origin in step.origins)
        decoding = speculative_decoding(steps, self.generation.target.max_nodes, detailed=level == "detailed")
        return responses.Metrics(decoding, dict(origins) if origins else UNSET)

    def detail(self, output: OutputBuffer) -> Any:
        """The steps behind an event."""
        delta = output.delta
        if not self.detailed or delta is None:
            return UNSET
        return {"tokens": delta.tokens, "ends": delta.ends, "verified": delta.verified, "steps": output.steps}

    def seed(self, output: OutputBuffer) -> responses.Seed:
        """Text if the request's was."""
        if output.seed is None or output.begun:
            return UNSET
        return str(output.seed) if isinstance(self.body.seed, str) else output.seed

    def outcome(self, output: OutputBuffer) -> dict[str, Any]:
        """Fields that all choices have."""
        finish = output.finish
        return {
            "index": output.index,
            "finish_reason": finish and finish.reason,
            "stop_reason": finish and finish.stop,
            "token_ids": output.token_ids if self.body.return_token_ids else UNSET,
            "seed": self.seed(output) if len(self.outputs) > 1 else UNSET,
        }

    def prompt_token_ids(self, output: OutputBuffer) -> list[int] | UnsetType:
        return output.prompt.tokens if self.body.return_token_ids and not output.begun else UNSET

    def scored_prompt(self, output: OutputBuffer) -> Sequence[TokenLogprobs]:
        """The engine scores a prompt once, for the first of its outputs, which it also begins first."""
        n = self.generation.params.n
        return self.outputs[output.index // n * n].prompt_logprobs

    def prompt_logprobs(self, output: OutputBuffer) -> PromptLogprobs | UnsetType:
        if self.body.prompt_logprobs is None or output.begun:
            return UNSET
        return [None, *(_prompt_logprob(entry, self.token_text) for entry in self.scored_prompt(output))]


class TextFormat(AnswerFormat):
    """/v1/completions: an answer and a chunk have one shape."""

    answer = chunk = responses.TextCompletion

    def choice(self, output: OutputBuffer) -> responses.TextChoice:
        text = "".join(output.text)
        return responses.TextChoice(
            **self.outcome(output),
            text=text if output.begun else self._echo(output) + text,
            logprobs=self._logprobs(output),
            prompt_logprobs=self.prompt_logprobs(output),
            prompt_token_ids=self.prompt_token_ids(output),
        )

    def _echo(self, output: OutputBuffer) -> str:
        if not self.body.echo:
            return ""
        text = output.prompt.text
        return self.tokenizer.decode(output.prompt.tokens) if text is None else text

    def _logprobs(self, output: OutputBuffer) -> responses.TextLogprobs | None:
        if self.generation.params.logprobs is None:
            return None
        start = len(self._echo(output))
        entries, offsets = output.logprobs, [start + offset for offset in output.offsets]
        if not self.body.echo or output.begun:
            return _text_logprobs(entries, offsets, self.names)
        scored = self.scored_prompt(output)
        offsets = _starts(output.prompt, self.tokenizer)[: len(scored) + 1] + offsets
        first = self.names(output.prompt.tokens[0])[0]  # which has no log-probability
        rest = _text_logprobs([*scored, *entries], offsets, self.names)
        return responses.TextLogprobs(
            [first, *rest.tokens], [None, *rest.token_logprobs], [None, *rest.top_logprobs], rest.text_offset
        )


class ChatFormat(AnswerFormat):
    """/v1/chat/completions."""

    answer, chunk = responses.ChatCompletion, responses.ChatChunk

    def whole(self) -> BaseAnswer:
        first = self.outputs[0]
        prompt_logprobs, token_ids = self.prompt_logprobs(first), self.prompt_token_ids(first)
        return replace(super().whole(), prompt_logprobs=prompt_logprobs, prompt_token_ids=token_ids)

    def choice(self, output: OutputBuffer) -> Struct:
        """Of an answer, or, once the output's first event says who speaks, of a chunk."""
        fields, text = {**self.outcome(output), "logprobs": self._logprobs(output)}, "".join(output.text)
        if self.body.stream:
            return responses.ChatChunkChoice(delta=responses.ChatDelta(content=text), **fields)
        return responses.ChatChoice(message=responses.ChatMessage("assistant", self.body.echoed + text), **fields)

    def chunks(self, output: OutputBuffer) -> list[BaseAnswer]:
        """The first event of an output says who speaks, and repeats what is echoed."""
        opening = [] if output.begun else [self._opening(output)]
        output.begun = True
        return opening + super().chunks(output)

    def _opening(self, output: OutputBuffer) -> BaseAnswer:
        delta = responses.ChatDelta(role="assistant", content=self.body.echoed)
        seed = self.seed(output) if len(self.outputs) > 1 else UNSET
        return self.event(
            output,
            responses.ChatChunkChoice(output.index, delta, None, None, seed=seed),
            prompt_logprobs=self.prompt_logprobs(output),
            prompt_token_ids=self.prompt_token_ids(output) if output.index == 0 else UNSET,
        )

    def _logprobs(self, output: OutputBuffer) -> responses.ChatLogprobs | None:
        if self.generation.params.logprobs is None:
            return None
        return responses.ChatLogprobs([_chat_logprob(entry, self.names) for entry in output.logprobs])


def speculative_decoding(
    steps: Sequence[Verified], spec_tokens: int, *, detailed: bool
) -> responses.SpeculativeDecoding:
    """Summary of at least one step."""
    accepted, drafted = sum(step.accepted for step in steps), sum(step.nodes for step in steps)
    by_length: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for step in steps:
        by_length[step.nodes][step.accepted] += 1
    return responses.SpeculativeDecoding(
        mean_acceptance_length=1 + accepted / len(steps),
        draft_acceptance_rate=accepted / drafted,
        acceptance_histogram=dict(sorted(Counter(step.accepted for step in steps).items())),
        acceptance_histogram_by_draft_length={n: dict(sorted(by_length[n].items())) for n in sorted(by_length)},
        num_spec_steps=len(steps),
        num_accepted_draft_tokens=accepted,
        num_draft_tokens=drafted,
        num_spec_tokens=spec_tokens,
        per_step_accepted=[step.accepted for step in steps] if detailed else UNSET,
        per_step_drafted=[step.nodes for step in steps] if detailed else UNSET,
    )


# -- log-probabilities


def _text_logprobs(entries: Sequence[TokenLogprobs], offsets: list[int], names: TokenNames) -> responses.TextLogprobs:
    """Each token begins at its offset in the text. `top_logprobs` has the token itself too."""
    return responses.TextLogprobs(
        [names(entry.token)[0] for entry in entries],
        [max(entry.logprob, LEAST) for entry in entries],
        [{names(t)[0]: max(p, LEAST) for t, p in (*entry.top, (entry.token, entry.logprob))} for entry in entries],
        offsets,
    )


def _starts(prompt: TokenizedPrompt, tokenizer: Any) -> list[int]:
    """Characters before each token. A text lacks the special tokens that the tokenizer put around it."""
    text, starts = TextStream(tokenizer, SamplingParams(skip_special_tokens=prompt.text is not None)), []
    for token in prompt.tokens:
        starts.append(len(text.text))
        text.add(token)
    return starts


def _chat_logprob(entry: TokenLogprobs, names: TokenNames) -> responses.ChatLogprob:
    top = [responses.TopLogprob(names(t)[0], max(p, LEAST), names(t)[1]) for t, p in entry.top]
    text, data = names(entry.token)
    return responses.ChatLogprob(text, max(entry.logprob, LEAST), data, top)


def _prompt_logprob(entry: TokenLogprobs, names: TokenNames) -> dict[int, responses.PromptLogprob]:
    """The likeliest tokens and the token itself, by token id, as in vLLM."""
    ranked = [(token, p, rank) for rank, (token, p) in enumerate(entry.top, 1)]
    every = (*ranked, (entry.token, entry.logprob, entry.rank))
    return {token: responses.PromptLogprob(max(p, LEAST), rank, names(token)[0]) for token, p, rank in every}


def token_text(tokenizer: Any) -> TokenNames:
    """Names tokens by their text. As OpenAI does, bytes that are no text alone are written bytes:\\xe2\\x98."""
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {}
    byte_level = '"ByteLevel"' in json.dumps(decoder)
    table = {character: byte for byte, character in bytes_to_unicode().items()}  # GPT-2's

    def bytes_of(piece: str) -> bytes:
        if byte_level:
            inside = all(character in table for character in piece)
            return bytes(table[character] for character in piece) if inside else piece.encode()
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace("▁", " ").encode()

    @lru_cache(1 << 16)
    def name(token: int) -> tuple[str, list[int]]:
        data = bytes_of(tokenizer.convert_ids_to_tokens(token) or "")
        try:
            return data.decode(), list(data)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data)

    return name
