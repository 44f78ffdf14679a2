"""Records of requests for metrics, logs and traces. Times are monotonic seconds."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from pilotfish.config import Mode
from pilotfish.core.request import FinishReason
from pilotfish.errors import ParameterError
from pilotfish.wire.serving import Delta, Verified

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,63}")
#: The API that a request came by.
OutputKind: TypeAlias = Literal["completion", "chat"]


@dataclass(frozen=True)
class RequestFacts:
    """Facts known when a request is submitted."""

    prompt_tokens: int
    n: int
    max_tokens: int | None
    mode: Mode  # of its speculation
    streaming: bool
    output: OutputKind = "completion"
    tag: str | None = None
    client: str | None = None  # the name of its key
    cached_tokens: int | None = None  # of the prompt; None: no cache was asked


@dataclass(frozen=True)
class RequestRecord:
    """A request that has ended."""

    facts: RequestFacts
    reason: FinishReason
    arrived: float
    ended: float
    queued: float | None  # seconds from submission to the first row in a step
    first_token: float | None  # moments; None: there was none
    last_token: float | None
    generation_tokens: int  # of all outputs
    longest: int  # tokens of the longest output
    verify_steps: int  # of one output each, with a tree
    drafted: int  # nodes of these trees
    accepted: int  # of them
    accepted_by_origin: dict[str, int]

    @property
    def latency(self) -> float:
        return self.ended - self.arrived

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def prefill(self) -> float | None:
        """Seconds from the first row in a step to the first token."""
        return None if self.first_token is None else max(self.first_token - self._scheduled, 0.0)

    @property
    def decode(self) -> float | None:
        """Seconds from the first token to the last."""
        if self.first_token is None or self.last_token is None:
            return None
        return self.last_token - self.first_token

    @property
    def inference(self) -> float | None:
        """Seconds from the first row in a step to the last token."""
        return None if self.last_token is None else max(self.last_token - self._scheduled, 0.0)

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds for each token of an output after its first; None if no output has a second one."""
        if self.decode is None or self.longest < 2:
            return None
        return self.decode / (self.longest - 1)

    @property
    def _scheduled(self) -> float:
        return self.arrived + (self.queued or 0.0)


def checked_tag(value: object, field: str = "metadata.tag") -> str:
    """The tag of a request; `field` is where it came from, for the error's message."""
    if isinstance(value, str) and _TAG.fullmatch(value):
        return value
    shown = value[:80] if isinstance(value, str) else value
    raise ParameterError(field, shown, "1 to 64 letters, digits and _ . : / -, a letter or digit first")


class RequestSink(Protocol):
    """Receiver of a meter's events; `ServerMetrics` is one."""

    def started(self) -> None: ...
    def first_token(self, seconds: float, prompt_tokens: int) -> None: ...
    def inter_token(self, seconds: float) -> None: ...
    def finished(self, record: RequestRecord) -> None: ...


class RequestMeter:
    """Follows one request. `finish` must be called once, however the request ends."""

    def __init__(self, sink: RequestSink, facts: RequestFacts, now: float) -> None:
        self._sink, self._facts, self._arrived = sink, facts, now
        self._queued: float | None = None
        self._first: float | None = None
        self._last: float | None = None
        self._tokens = [0] * facts.n
        self._steps: list[float | None] = [None] * facts.n  # of each output's newest tokens, on the target's clock
        self._reasons: set[FinishReason] = set()
        self._verify_steps = self._drafted = self._accepted = 0
        self._origins: Counter[str] = Counter()
        sink.started()

    def update(self, index: int, delta: Delta, now: float) -> None:
        """Count a delta of output `index` among all outputs of the request, which reached the server at `now`."""
        if delta.queued is not None and self._queued is None:
            self._queued = delta.queued
        if delta.tokens:
            self._token(now)
            self._tokens[index] += len(delta.tokens)
        for verified in delta.verified:
            self._verify(index, verified)
        if delta.finish is not None:
            self._reasons.add(delta.finish.reason)

    def finish(self, now: float, reason: FinishReason | None = None) -> RequestRecord:
        """The request has ended, for `reason` or else as its outputs did."""
        record = RequestRecord(
            facts=self._facts,
            reason=reason or self._reason(),
            arrived=self._arrived,
            ended=now,
            queued=self._queued,
            first_token=self._first,
            last_token=self._last,
            generation_tokens=sum(self._tokens),
            longest=max(self._tokens),
            verify_steps=self._verify_steps,
            drafted=self._drafted,
            accepted=self._accepted,
            accepted_by_origin=dict(self._origins),
        )
        self._sink.finished(record)
        return record

    def _token(self, now: float) -> None:
        if self._first is None:
            self._first = now
            self._sink.first_token(now - self._arrived, self._facts.prompt_tokens)
        self._last = now

    def _verify(self, index: int, verified: Verified) -> None:
        if verified.nodes:
            self._verify_steps += 1
            self._drafted += verified.nodes
            self._accepted += verified.accepted
            self._origins.update(verified.origins)
        if verified.tokens:
            before, self._steps[index] = self._steps[index], verified.at
            if before is not None:
                self._sink.inter_token(verified.at - before)

    def _reason(self) -> FinishReason:
        """The worst of the outputs' reasons. An output without a reason was aborted."""
        if FinishReason.LENGTH in self._reasons and FinishReason.ABORT not in self._reasons:
            return FinishReason.LENGTH
        return FinishReason.STOP if self._reasons == {FinishReason.STOP} else FinishReason.ABORT
