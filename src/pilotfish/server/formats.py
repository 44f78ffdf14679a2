"""The two shapes of an answer: completions, and chats. Each gives it whole, or as the chunks of a stream."""

from __future__ import annotations

from typing import Any, Protocol

from msgspec import UNSET, Struct, UnsetType

from pilotfish.server import logprobs as lp
from pilotfish.server.acceptance import detail, metrics
from pilotfish.server.answers import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Completion,
    Metrics,
    PromptLogprobs,
    TextChoice,
    TextLogprobs,
    Usage,
)
from pilotfish.server.job import Growth, Plan
from pilotfish.server.outputs import Output, Outputs
from pilotfish.server.pieces import Pieces, TokenIdNames, TokenNames


class Format(Protocol):
    def whole(self) -> Struct:
        """The answer, once all outputs have finished."""
        ...

    def chunks(self, output: Output, growth: Growth) -> list[Struct]:
        """What an update added."""
        ...

    def closing(self) -> Struct:
        """The chunk after the last output's, with the usage."""
        ...


class _Shape:
    """What both formats say around their choices."""

    def __init__(self, plan: Plan, outputs: Outputs, tokenizer: Any, pieces: Pieces) -> None:
        self.plan, self.outputs, self.tokenizer, self.pieces = plan, outputs, tokenizer, pieces
        self.names: TokenNames = TokenIdNames(pieces) if plan.tokens_as_ids else pieces
        self.head: dict[str, Any] = {
            "id": plan.id,
            "created": plan.created,
            "model": plan.model,
            "system_fingerprint": plan.fingerprint,
        }

    def usage(self) -> Usage | UnsetType | None:
        """Of a chunk. As OpenAI's, it is null where the closing chunk will have it."""
        if self.plan.continuous_usage:
            return self.outputs.usage
        return None if self.plan.usage else UNSET

    def metrics(self) -> Metrics | UnsetType:
        return metrics(self.plan, self.outputs.all[0].verified)

    def last_metrics(self, output: Output) -> Metrics | UnsetType:
        """Of the chunk that is the last one where no closing chunk follows."""
        ended = output.finish is not None and all(each.finish for each in self.outputs.all)
        return self.metrics() if ended and not self.plan.usage else UNSET

    def seed(self, output: Output) -> int | str | UnsetType:
        """As text where the client gave its seed so."""
        if output.seed is None or output.begun:
            return UNSET
        return str(output.seed) if self.plan.seed_as_text else output.seed

    def own_seed(self, output: Output) -> int | str | UnsetType:
        """In a choice: where there are several."""
        return self.seed(output) if self.plan.outputs > 1 else UNSET

    def first_seed(self, output: Output) -> int | str | UnsetType:
        """In the answer: of the first output."""
        return self.seed(output) if output.index == 0 else UNSET

    def token_ids(self, output: Output) -> list[int] | UnsetType:
        return output.token_ids if self.plan.token_ids else UNSET

    def prompt_token_ids(self, output: Output) -> list[int] | UnsetType:
        return output.prompt.tokens if self.plan.token_ids and not output.begun else UNSET

    def prompt_logprobs(self, output: Output) -> PromptLogprobs | UnsetType:
        if not self.plan.prompt_logprobs or output.begun:
            return UNSET
        return lp.prompt_logprobs(self.outputs.prompt_logprobs(output), self.pieces)


class TextFormat(_Shape):
    """/v1/completions: an answer and a chunk have one shape."""

    def whole(self) -> Completion:
        first = self.outputs.all[0]
        return Completion(
            **self.head,
            choices=[self._choice(output) for output in self.outputs.all],
            seed=self.first_seed(first),
            usage=self.outputs.usage,
            metrics=self.metrics(),
        )

    def chunks(self, output: Output, growth: Growth) -> list[Struct]:
        chunk = Completion(
            **self.head,
            choices=[self._choice(output)],
            seed=self.first_seed(output),
            usage=self.usage(),
            metrics=self.last_metrics(output),
            pilotfish=detail(self.plan, growth),
        )
        return [chunk]

    def closing(self) -> Completion:
        return Completion(**self.head, choices=[], usage=self.outputs.usage, metrics=self.metrics())

    def _choice(self, output: Output) -> TextChoice:
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
            seed=self.own_seed(output),
        )

    def _echo(self, output: Output) -> str:
        if not self.plan.echo:
            return ""
        text = output.prompt.text
        return self.tokenizer.decode(output.prompt.tokens) if text is None else text

    def _logprobs(self, output: Output) -> TextLogprobs | None:
        if self.plan.logprobs is None:
            return None
        start = len(self._echo(output))
        own = lp.text_logprobs(output.logprobs, [start + offset for offset in output.offsets], self.names)
        if not self.plan.echo or output.begun:
            return own
        echoed = self.outputs.prompt_logprobs(output)
        return lp.joined(lp.echoed_logprobs(output.prompt, echoed, self.tokenizer, self.names), own)


class ChatFormat(_Shape):
    """/v1/chat/completions."""

    def whole(self) -> ChatCompletion:
        first = self.outputs.all[0]
        return ChatCompletion(
            **self.head,
            choices=[self._choice(output) for output in self.outputs.all],
            seed=self.first_seed(first),
            usage=self.outputs.usage,
            metrics=self.metrics(),
            prompt_logprobs=self.prompt_logprobs(first),
            prompt_token_ids=self.prompt_token_ids(first),
        )

    def chunks(self, output: Output, growth: Growth) -> list[Struct]:
        """The first chunk of an output says who speaks, and repeats what is echoed."""
        chunk = ChatChunk(
            **self.head,
            choices=[self._added(output)],
            usage=self.usage(),
            metrics=self.last_metrics(output),
            pilotfish=detail(self.plan, growth),
        )
        return [chunk] if output.begun else [self._opening(output), chunk]

    def closing(self) -> ChatChunk:
        return ChatChunk(**self.head, choices=[], usage=self.outputs.usage, metrics=self.metrics())

    def _opening(self, output: Output) -> ChatChunk:
        delta = ChatDelta(role="assistant", content=self.plan.echoed)
        return ChatChunk(
            **self.head,
            choices=[ChatChunkChoice(output.index, delta, None, None, seed=self.own_seed(output))],
            seed=self.first_seed(output),
            usage=self.usage(),
            prompt_logprobs=self.prompt_logprobs(output),
            prompt_token_ids=self.prompt_token_ids(output) if output.index == 0 else UNSET,
        )

    def _added(self, output: Output) -> ChatChunkChoice:
        delta, ids = ChatDelta(content="".join(output.text)), self.token_ids(output)
        return ChatChunkChoice(output.index, delta, self._logprobs(output), output.reason, output.stop, ids)

    def _choice(self, output: Output) -> ChatChoice:
        return ChatChoice(
            index=output.index,
            message=ChatMessage("assistant", self.plan.echoed + "".join(output.text)),
            logprobs=self._logprobs(output),
            finish_reason=output.reason,
            stop_reason=output.stop,
            token_ids=self.token_ids(output),
            seed=self.own_seed(output),
        )

    def _logprobs(self, output: Output) -> ChatLogprobs | None:
        return None if self.plan.logprobs is None else lp.chat_logprobs(output.logprobs, self.names)
