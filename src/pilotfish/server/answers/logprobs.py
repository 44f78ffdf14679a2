"""Log-probabilities are written as they come: those of a long prompt are megabytes, and would hold up all streams."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from msgspec import Raw

from pilotfish.core.scheduling.executor import TokenLogprobs
from pilotfish.engine.token_table import token_bytes
from pilotfish.server.http_errors import encode

LEAST = -9999.0  # stands for minus infinity, which JSON does not know
#: A token's name in log-probabilities, and its bytes.
TokenNames = Callable[[int], tuple[str, list[int]]]


def prompt_logprob(entry: TokenLogprobs, names: TokenNames) -> Raw:
    ranked = [(token, p, rank) for rank, (token, p) in enumerate(entry.top, 1)]
    every = (*ranked, (entry.token, entry.logprob, entry.rank))
    part = {t: {"logprob": max(p, LEAST), "rank": rank, "decoded_token": names(t)[0]} for t, p, rank in every}
    return Raw(encode(part))


def chat_logprob(entry: TokenLogprobs, names: TokenNames) -> dict[str, Any]:
    def named(token: int, logprob: float) -> dict[str, Any]:
        text, data = names(token)
        return {"token": text, "logprob": max(logprob, LEAST), "bytes": data}

    return {**named(entry.token, entry.logprob), "top_logprobs": [named(*likely) for likely in entry.top]}


def token_text(tokenizer: Any) -> TokenNames:
    """As in OpenAI's API, bytes that are no text alone are written bytes:\\xe2\\x98."""
    bytes_of = token_bytes(tokenizer)

    @lru_cache(1 << 16)
    def name(token: int) -> tuple[str, list[int]]:
        data = bytes_of(token)
        try:
            return data.decode(), list(data)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data)

    return name
