"""Log-probabilities in answers. They are written as they come: those of a long prompt are megabytes, and all streams
would wait while they were written at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from msgspec import Raw, Struct

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import TokenLogprobs
from pilotfish.engine.sample import TextStream
from pilotfish.engine.token_table import token_bytes
from pilotfish.server.bodies.params import TokenizedPrompt
from pilotfish.server.http_errors import encode

LEAST = -9999.0  # stands for minus infinity, which JSON does not know
#: A token's name in log-probabilities, and its bytes.
TokenNames = Callable[[int], tuple[str, list[int]]]


def prompt_logprob(entry: TokenLogprobs, names: TokenNames) -> Raw:
    """The likeliest tokens and the token itself, by token id, as in vLLM."""
    ranked = [(token, p, rank) for rank, (token, p) in enumerate(entry.top, 1)]
    every = (*ranked, (entry.token, entry.logprob, entry.rank))
    part = {t: {"logprob": max(p, LEAST), "rank": rank, "decoded_token": names(t)[0]} for t, p, rank in every}
    return Raw(encode(part))


class TextLogprob(Struct, frozen=True):
    """A token's in a completion. `top` has the token itself too."""

    token: str
    logprob: float | None = None
    top: Raw | None = None


def text_logprob(entry: TokenLogprobs, names: TokenNames) -> TextLogprob:
    likeliest = (*entry.top, (entry.token, entry.logprob))
    top = {names(token)[0]: max(logprob, LEAST) for token, logprob in likeliest}
    return TextLogprob(names(entry.token)[0], max(entry.logprob, LEAST), Raw(encode(top)))


class EchoedPrompt:
    """A prompt that a completion repeats with its log-probabilities; the first token has none."""

    def __init__(self, prompt: TokenizedPrompt, tokenizer: Any, names: TokenNames) -> None:
        self._names = names
        # a text lacks the special tokens that the tokenizer put around it
        self._text = TextStream(tokenizer, SamplingParams(skip_special_tokens=prompt.text is not None))
        self.starts = list[int]()  # characters before each token
        self.logprobs = list[TextLogprob]()
        self._append(prompt.tokens[0], TextLogprob(names(prompt.tokens[0])[0]))

    def add(self, entries: Iterable[TokenLogprobs]) -> None:
        for entry in entries:
            self._append(entry.token, text_logprob(entry, self._names))

    def _append(self, token: int, logprob: TextLogprob) -> None:
        self.starts.append(len(self._text.text))
        self._text.add(token)
        self.logprobs.append(logprob)


def token_text(tokenizer: Any) -> TokenNames:
    """Names tokens by their text. As OpenAI does, bytes that are no text alone are written bytes:\\xe2\\x98."""
    bytes_of = token_bytes(tokenizer)

    @lru_cache(1 << 16)
    def name(token: int) -> tuple[str, list[int]]:
        data = bytes_of(token)
        try:
            return data.decode(), list(data)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data)

    return name
