"""Log-probabilities as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pilotfish.core.logprobs import TokenLogprobs
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.engine.sample import TextStream
from pilotfish.server.answers import ChatLogprob, ChatLogprobs, PromptLogprob, PromptLogprobs, TextLogprobs, TopLogprob
from pilotfish.server.pieces import TokenNames
from pilotfish.server.prompts import Prompt

LEAST = -9999.0  # stands for minus infinity, which JSON does not know


def text_logprobs(logprobs: Sequence[TokenLogprobs], offsets: Sequence[int], names: TokenNames) -> TextLogprobs:
    """Of a completion's tokens, of which each begins at its offset in the text."""
    return TextLogprobs(
        [names.of(entry.token)[0] for entry in logprobs],
        [max(entry.logprob, LEAST) for entry in logprobs],
        [_top(entry, names) for entry in logprobs],
        list(offsets),
    )


def _top(entry: TokenLogprobs, names: TokenNames) -> dict[str, float]:
    """The likeliest tokens and the one itself."""
    return {names.of(t)[0]: max(p, LEAST) for t, p in (*entry.top, (entry.token, entry.logprob))}


def joined(first: TextLogprobs, second: TextLogprobs) -> TextLogprobs:
    return TextLogprobs(
        first.tokens + second.tokens,
        first.token_logprobs + second.token_logprobs,
        first.top_logprobs + second.top_logprobs,
        first.text_offset + second.text_offset,
    )


def echoed_logprobs(
    prompt: Prompt, logprobs: Sequence[TokenLogprobs], tokenizer: Any, names: TokenNames
) -> TextLogprobs:
    """Of a prompt that is repeated: nothing is said of its first token."""
    first = TextLogprobs([names.of(prompt.tokens[0])[0]], [None], [None], [0])
    return joined(first, text_logprobs(logprobs, _starts(prompt, tokenizer)[1 : len(logprobs) + 1], names))


def _starts(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Characters before each token. A text lacks the special tokens that the tokenizer put around it."""
    text, starts = TextStream(tokenizer, SamplingParams(skip_special_tokens=prompt.text is not None)), []
    for token in prompt.tokens:
        starts.append(len(text.text))
        text.add(token)
    return starts


def chat_logprobs(logprobs: Sequence[TokenLogprobs], names: TokenNames) -> ChatLogprobs:
    return ChatLogprobs([_chat(entry, names) for entry in logprobs])


def _chat(entry: TokenLogprobs, names: TokenNames) -> ChatLogprob:
    top = [TopLogprob(names.of(t)[0], max(p, LEAST), names.of(t)[1]) for t, p in entry.top]
    text, data = names.of(entry.token)
    return ChatLogprob(text, max(entry.logprob, LEAST), data, top)


def prompt_logprobs(logprobs: Sequence[TokenLogprobs], names: TokenNames) -> PromptLogprobs:
    """As vLLM has them: of each token but the first the likeliest ones and itself, by token id."""

    def of(entry: TokenLogprobs) -> dict[int, PromptLogprob]:
        ranked = [(token, p, rank) for rank, (token, p) in enumerate(entry.top, 1)]
        every = (*ranked, (entry.token, entry.logprob, entry.rank))
        return {token: PromptLogprob(max(p, LEAST), rank, names.of(token)[0]) for token, p, rank in every}

    return [None, *map(of, logprobs)]
