"""What became of each request: its times, tokens and what was guessed of them. Definitions are the field's."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from msgspec import Struct

from pilotfish.cli.bench.serving.acceptance import Accepted, accepted_of
from pilotfish.cli.bench.serving.client import Answer
from pilotfish.cli.bench.serving.reading import error_of, finish_reason, generated_text, token_times, usage_of
from pilotfish.cli.bench.serving.sending import Sent

#: How an answer's tokens were counted.
USAGE, TOKENIZER, EVENTS = "usage", "tokenizer", "events"


class SentRequest(Struct, frozen=True, kw_only=True):
    """A request that was sent. Times are in seconds from the beginning of its load."""

    id: str
    category: str
    session: str
    turn: int
    round: int = 0
    due: float  # when it was to be sent
    sent: float  # when it was written to its connection
    first: float | None  # when its first token came; None where none did
    ended: float
    times: list[float]  # of each token; those that come together have equal times
    tokens: int
    prompt_tokens: int | None
    cached_tokens: int | None
    counted_by: str
    finish_reason: str | None
    error: str = ""
    accepted: Accepted | None = None

    @property
    def ttft(self) -> float | None:
        return None if self.first is None else self.first - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first, to the last; None of fewer than two."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else None

    @property
    def e2e(self) -> float:
        return self.ended - self.sent

    @property
    def gaps(self) -> list[float]:
        return [later - sooner for sooner, later in pairwise(self.times) if later > sooner]


def record_of(sent: Sent, began: float, tokenizer: Any) -> SentRequest:
    """`began` is the load's beginning; `tokenizer` counts tokens where the server does not, and may be None."""
    answer, request = sent.answer(), sent.request
    usage, error = usage_of(answer), sent.error or error_of(answer)
    tokens, counted_by = _tokens(answer, usage, tokenizer)
    times = [] if error else [round(at - began, 6) for at in token_times(answer, tokens)]
    details = usage.get("prompt_tokens_details") or {}
    return SentRequest(
        id=request.id,
        category=request.category,
        session=request.session,
        turn=request.turn,
        due=round(sent.due - began, 6),
        sent=round(answer.sent - began, 6),
        first=times[0] if times else None,
        ended=round(answer.closed - began, 6),
        times=times,
        tokens=tokens,
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=details.get("cached_tokens"),
        counted_by=counted_by,
        finish_reason=finish_reason(answer),
        error=error,
        accepted=accepted_of(answer),
    )


def _tokens(answer: Answer, usage: Mapping[str, Any], tokenizer: Any) -> tuple[int, str]:
    if "completion_tokens" in usage:
        return int(usage["completion_tokens"]), USAGE
    texts = [generated_text(event) for event in answer.events]
    if tokenizer is not None:
        return len(tokenizer.encode("".join(texts), add_special_tokens=False).ids), TOKENIZER
    return sum(map(bool, texts)), EVENTS
