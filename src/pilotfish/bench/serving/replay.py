"""Traces in Mooncake's format as requests: blocks with equal hashes become equal texts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from math import ceil
from typing import Any

from pilotfish.bench.serving.options import ServeBenchOptions
from pilotfish.bench.serving.requests import RequestSession, ServerRequest
from pilotfish.bench.serving.texts import TextMaker
from pilotfish.plan.trace import BLOCK_TOKENS, TimedRequest, read_trace

#: Keeps draws of a block's text apart from others with the same seed.
_BLOCK = 3


def replayed(options: ServeBenchOptions, tokenizer: Any) -> Iterator[RequestSession]:
    """A session for each line, at its time. InputError names the first line that lacks a field."""
    assert options.trace is not None
    requests, scale = read_trace(options.trace, TimedRequest), options.block_tokens / BLOCK_TOKENS

    @lru_cache(1 << 14)
    def block(hash_id: int) -> str:
        return TextMaker(tokenizer, (options.seed, _BLOCK, hash_id)).take(options.block_tokens)

    for number, request in enumerate(requests):
        whole = "".join(block(abs(hash_id)) for hash_id in request.hash_ids)
        characters = len(whole) * request.input_length / (BLOCK_TOKENS * len(request.hash_ids))
        answer = options.answer_tokens or max(1, ceil(scale * request.output_length))
        prompt = whole[: max(1, round(characters))]
        one = ServerRequest(f"trace-{number}", "trace", answer, prompt=prompt, session=f"trace-{number}")
        yield RequestSession([one], at=request.timestamp / 1000)
