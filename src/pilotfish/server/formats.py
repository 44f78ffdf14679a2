"""The bodies of answers: a completion's and a chat's, each whole or as the chunks of a stream, and their
log-probabilities."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from msgspec import UNSET, Struct, UnsetType
from tokenizers.pre_tokenizers import ByteLevel

from pilotfish.core.logprobs import TokenLogprobs
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.engine.sample import TextStream
from pilotfish.server.params import Generation, TokenizedPrompt
from pilotfish.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprob,
    ChatLogprobs,
    ChatMessage,
    Metrics,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    SpeculationMetrics,
    TextChoice,
    TextCompletion,
    TextLogprobs,
    TopLogprob,
    Usage,
)
from pilotfish.wire.serving import Delta, Finish, StepReport, Verified

LEAST = -9999.0  # stands for minus infinity, which JSON does not know
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
#: A token's name in log-probabilities, and its bytes.
TokenNames = Callable[[int], tuple[str, list[int]]]


@dataclass
class OutputBuffer:
    """One output of one prompt. `text`, `token_ids`, `logprobs` and `offsets` are what the client has not been sent."""

    index: int
    prompt: TokenizedPrompt
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # characters of the whole output's text before each token
    begun: bool = False  # the client has been sent something
    tokens: int = 0
    end: int = 0  # characters of the whole output's text
    seed: int | None = None
    finish: Finish | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    verified: list[Verified] = field(default_factory=list)
    delta: Delta | None = None  # the newest
    steps: Sequence[StepReport] = ()  # behind it

    def add(self, delta: Delta, steps: Sequence[StepReport]) -> None:
        self.delta, self.steps = delta, steps
        self.text.append(delta.text)
        self.token_ids += delta.tokens
        self.logprobs += delta.logprobs
        if delta.ends:
            self.offsets += (self.end, *delta.ends[:-1])
            self.end = delta.ends[-1]
        self.tokens += len(delta.tokens)
        self.seed = delta.seed if self.seed is None else self.seed
        self.finish = delta.finish or self.finish
        self.prompt_logprobs += delta.prompt_logprobs
        self.verified += delta.verified

    def clear(self) -> None:
        """All of it was sent."""
        self.begun = True
        self.text.clear()
        self.token_ids.clear()
        self.logprobs.clear()
        self.offsets.clear()

    @property
    def reason(self) -> str | None:
        return None if self.finish is None else self.finish.reason

    @property
    def stop(self) -> str | int | None:
        return None if self.finish is None else self.finish.stop

    @property
    def started(self) -> bool:
        """False while the engine scores a prompt, part by part: the first event has all of it."""
        return self.tokens > 0 or self.finish is not None

    @property
    def has_news(self) -> bool:
        """Whether there is something to send: tokens can end within a character, or where a stop string may begin."""
        return not self.begun or self.finish is not None or bool(self.logprobs) or any(self.text)


class _Format:
    """Fields around the choices."""

    def __init__(
        self, generation: Generation, outputs: Sequence[OutputBuffer], tokenizer: Any, token_text: TokenNames
    ) -> None:
        body = generation.body
        self.generation, self.outputs, self.tokenizer, self.token_text = generation, outputs, tokenizer, token_text
        self.names: TokenNames = token_text
        if body.return_tokens_as_token_ids:
            self.names = lambda token: (f"token_id:{token}", token_text(token)[1])
        self.n = generation.params.n
        self.options = generation.stream_options
        self.wants_ids, self.wants_prompt_logprobs = bool(body.return_token_ids), body.prompt_logprobs is not None
        self.seed_as_text = isinstance(body.seed, str)  # as the client gave it
        self.head: dict[str, Any] = {
            "id": generation.id,
            "created": generation.created,
            "model": generation.model,
            "system_fingerprint": generation.fingerprint,
        }

    def usage(self) -> Usage:
        prompts = sum(len(prompt.tokens) for prompt in self.generation.prompts)
        completions = sum(output.tokens for output in self.outputs)
        cached = PromptTokensDetails(0)  # no KV is kept across requests
        return Usage(prompts, completions, prompts + completions, cached)

    def chunk_usage(self) -> Usage | UnsetType | None:
        """As OpenAI's, it is null where the closing chunk will have it."""
        if self.options.continuous_usage_stats:
            return self.usage()
        return None if self.options.include_usage else UNSET

    def metrics(self) -> Metrics | UnsetType:
        """As in vLLM there are none of several outputs."""
        level = self.generation.metrics
        if level == "none":
            return UNSET
        steps = [step for step in self.outputs[0].verified if step.nodes] if len(self.outputs) == 1 else []
        if not steps:
            return Metrics(None)
        origins = Counter(origin for step in steps for origin in step.origins)
        acceptance = speculation_metrics(steps, self.generation.target.max_nodes, detailed=level == "detailed")
        return Metrics(acceptance, dict(origins) if origins else UNSET)

    def last_metrics(self, output: OutputBuffer) -> Metrics | UnsetType:
        """Of the chunk that is the last one where no closing chunk follows."""
        ended = output.finish is not None and all(each.finish for each in self.outputs)
        return self.metrics() if ended and not self.options.include_usage else UNSET

    def detail(self, output: OutputBuffer) -> Any:
        """The steps behind one event of a stream."""
        if not self.generation.detail or output.delta is None:
            return UNSET
        delta = output.delta
        return {"tokens": delta.tokens, "ends": delta.ends, "verified": delta.verified, "steps": output.steps}

    def seed(self, output: OutputBuffer) -> int | str | UnsetType:
        if output.seed is None or output.begun:
            return UNSET
        return str(output.seed) if self.seed_as_text else output.seed

    def choice_seed(self, output: OutputBuffer) -> int | str | UnsetType:
        """In a choice: where there are several."""
        return self.seed(output) if len(self.outputs) > 1 else UNSET

    def first_seed(self, output: OutputBuffer) -> int | str | UnsetType:
        """In the answer: of the first output."""
        return self.seed(output) if output.index == 0 else UNSET

    def token_ids(self, output: OutputBuffer) -> list[int] | UnsetType:
        return output.token_ids if self.wants_ids else UNSET

    def prompt_token_ids(self, output: OutputBuffer) -> list[int] | UnsetType:
        return output.prompt.tokens if self.wants_ids and not output.begun else UNSET

    def scored_prompt(self, output: OutputBuffer) -> Sequence[TokenLogprobs]:
        """The engine scores a prompt once, for the first of its outputs, which it also begins first."""
        return self.outputs[output.index // self.n * self.n].prompt_logprobs

    def prompt_logprobs(self, output: OutputBuffer) -> PromptLogprobs | UnsetType:
        if not self.wants_prompt_logprobs or output.begun:
            return UNSET
        return [None, *(_prompt_logprob(entry, self.token_text) for entry in self.scored_prompt(output))]


class TextFormat(_Format):
    """/v1/completions: an answer and a chunk have one shape."""

    def whole(self) -> TextCompletion:
        return TextCompletion(
            **self.head,
            choices=[self._choice(output) for output in self.outputs],
            seed=self.first_seed(self.outputs[0]),
            usage=self.usage(),
            metrics=self.metrics(),
        )

    def chunks(self, output: OutputBuffer) -> list[Struct]:
        """Events of the newest update of an output."""
        chunk = TextCompletion(
            **self.head,
            choices=[self._choice(output)],
            seed=self.first_seed(output),
            usage=self.chunk_usage(),
            metrics=self.last_metrics(output),
            pilotfish=self.detail(output),
        )
        return [chunk]

    def closing(self) -> TextCompletion:
        """The event after the last output's, with the usage."""
        return TextCompletion(**self.head, choices=[], usage=self.usage(), metrics=self.metrics())

    def _choice(self, output: OutputBuffer) -> TextChoice:
        before = self._echo(output) if not output.begun else ""
        return TextChoice(
            index=output.index,
            text=before + "".join(output.text),
            logprobs=self._logprobs(output),
            finish_reason=output.reason,
            stop_reason=output.stop,
            prompt_logprobs=self.prompt_logprobs(output),
            prompt_token_ids=self.prompt_token_ids(output),
            token_ids=self.token_ids(output),
            seed=self.choice_seed(output),
        )

    def _echo(self, output: OutputBuffer) -> str:
        if not self.generation.body.echo:
            return ""
        text = output.prompt.text
        return self.tokenizer.decode(output.prompt.tokens) if text is None else text

    def _logprobs(self, output: OutputBuffer) -> TextLogprobs | None:
        if self.generation.params.logprobs is None:
            return None
        start = len(self._echo(output))
        entries, offsets = output.logprobs, [start + offset for offset in output.offsets]
        if not self.generation.body.echo or output.begun:
            return text_logprobs(entries, offsets, self.names)
        scored = self.scored_prompt(output)
        offsets = _starts(output.prompt, self.tokenizer)[1 : len(scored) + 1] + offsets
        echoed = text_logprobs([*scored, *entries], offsets, self.names)
        first = self.names(output.prompt.tokens[0])[0]  # which has no log-probability
        return TextLogprobs(
            [first, *echoed.tokens],
            [None, *echoed.token_logprobs],
            [None, *echoed.top_logprobs],
            [0, *echoed.text_offset],
        )


class ChatFormat(_Format):
    """/v1/chat/completions."""

    def whole(self) -> ChatCompletion:
        first = self.outputs[0]
        return ChatCompletion(
            **self.head,
            choices=[self._choice(output) for output in self.outputs],
            seed=self.first_seed(first),
            usage=self.usage(),
            metrics=self.metrics(),
            prompt_logprobs=self.prompt_logprobs(first),
            prompt_token_ids=self.prompt_token_ids(first),
        )

    def chunks(self, output: OutputBuffer) -> list[Struct]:
        """Events of the newest update of an output. The first says who speaks, and repeats what is echoed."""
        delta = ChatDelta(content="".join(output.text))
        logprobs, ids = self._logprobs(output), self.token_ids(output)
        choice = ChatChunkChoice(output.index, delta, logprobs, output.reason, output.stop, ids)
        chunk = ChatChunk(
            **self.head,
            choices=[choice],
            usage=self.chunk_usage(),
            metrics=self.last_metrics(output),
            pilotfish=self.detail(output),
        )
        return [chunk] if output.begun else [self._opening(output), chunk]

    def closing(self) -> ChatChunk:
        """The event after the last output's, with the usage."""
        return ChatChunk(**self.head, choices=[], usage=self.usage(), metrics=self.metrics())

    def _opening(self, output: OutputBuffer) -> ChatChunk:
        delta = ChatDelta(role="assistant", content=self.generation.echoed)
        return ChatChunk(
            **self.head,
            choices=[ChatChunkChoice(output.index, delta, None, None, seed=self.choice_seed(output))],
            seed=self.first_seed(output),
            usage=self.chunk_usage(),
            prompt_logprobs=self.prompt_logprobs(output),
            prompt_token_ids=self.prompt_token_ids(output) if output.index == 0 else UNSET,
        )

    def _choice(self, output: OutputBuffer) -> ChatChoice:
        return ChatChoice(
            index=output.index,
            message=ChatMessage("assistant", self.generation.echoed + "".join(output.text)),
            logprobs=self._logprobs(output),
            finish_reason=output.reason,
            stop_reason=output.stop,
            token_ids=self.token_ids(output),
            seed=self.choice_seed(output),
        )

    def _logprobs(self, output: OutputBuffer) -> ChatLogprobs | None:
        if self.generation.params.logprobs is None:
            return None
        return ChatLogprobs([_chat_logprob(entry, self.names) for entry in output.logprobs])


def speculation_metrics(steps: Sequence[Verified], spec_tokens: int, *, detailed: bool) -> SpeculationMetrics:
    """Of at least one step."""
    accepted, drafted = sum(step.accepted for step in steps), sum(step.nodes for step in steps)
    by_length: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for step in steps:
        by_length[step.nodes][step.accepted] += 1
    return SpeculationMetrics(
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


def text_logprobs(entries: Sequence[TokenLogprobs], offsets: list[int], names: TokenNames) -> TextLogprobs:
    """Each token begins at its offset in the text. `top_logprobs` has the token itself too."""
    return TextLogprobs(
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


def _chat_logprob(entry: TokenLogprobs, names: TokenNames) -> ChatLogprob:
    top = [TopLogprob(names(t)[0], max(p, LEAST), names(t)[1]) for t, p in entry.top]
    text, data = names(entry.token)
    return ChatLogprob(text, max(entry.logprob, LEAST), data, top)


def _prompt_logprob(entry: TokenLogprobs, names: TokenNames) -> dict[int, PromptLogprob]:
    """As vLLM has them: the likeliest tokens and the token itself, by token id."""
    ranked = [(token, p, rank) for rank, (token, p) in enumerate(entry.top, 1)]
    every = (*ranked, (entry.token, entry.logprob, entry.rank))
    return {token: PromptLogprob(max(p, LEAST), rank, names(token)[0]) for token, p, rank in every}


class TokenText:
    """Single tokens as text and bytes. Called with a token id."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {}
        self._table = _byte_level() if '"ByteLevel"' in json.dumps(decoder) else None
        self.of = lru_cache(1 << 16)(self._of)

    def _of(self, token: int) -> tuple[str, list[int]]:
        """As OpenAI does, bytes that are no text alone are written bytes:\\xe2\\x98."""
        data = self._bytes(self._tokenizer.convert_ids_to_tokens(token) or "")
        try:
            return data.decode(), list(data)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data)

    def _bytes(self, piece: str) -> bytes:
        if self._table is not None:
            inside = all(character in self._table for character in piece)
            return bytes(self._table[character] for character in piece) if inside else piece.encode()
        if byte := _BYTE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace("▁", " ").encode()


def _byte_level() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for (GPT-2's table): printable bytes stand for
    themselves, the others, in order, for the characters from 256 on."""
    characters = sorted(ByteLevel.alphabet())
    own = {character: ord(character) for character in characters if ord(character) < 256}
    others = sorted(set(range(256)) - set(own.values()))
    moved = [character for character in characters if ord(character) >= 256]
    return own | dict(zip(moved, others, strict=True))
