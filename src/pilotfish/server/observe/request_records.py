"""Times are monotonic seconds."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pilotfish.config.fields import Mode
from pilotfish.core.prefilling.handover import HandOverReport
from pilotfish.core.scheduling.request import FinishReason
from pilotfish.engine.targets.stream import Updates
from pilotfish.errors import ParameterError
from pilotfish.operate.cascade_policy import CascadeAnswer
from pilotfish.operate.outcome import DEPTHS
from pilotfish.operate.variants import DEFAULT
from pilotfish.server.http_errors import ClientGone
from pilotfish.server.observe.metrics import ServerMetrics
from pilotfish.wire.serving import Delta, Verified

_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/-]{0,63}")
OutputKind: TypeAlias = Literal["completion", "chat", "response", "message"]  # the API that a request came by
#: The side that answered: of a request's speculation, or of a cascade.
ServedMode: TypeAlias = Mode | Literal["cascade", "small", "large"]


@dataclass(frozen=True)
class RequestFacts:
    prompts: tuple[int, ...]  # tokens of each
    max_tokens: int  # of an output
    n: int = 1
    mode: ServedMode = "off"  # of its speculation; cascade: it is for an alias of two models
    streaming: bool = False
    output: OutputKind = "completion"
    tag: str | None = None
    client: str | None = None  # the name of its key
    variant: str = DEFAULT  # of speculation

    @property
    def sequences(self) -> int:
        return len(self.prompts) * self.n

    @property
    def prompt_tokens(self) -> int:
        return sum(self.prompts)

    @property
    def tokens(self) -> int:
        """The most tokens that count for `tokens_per_minute`: a prompt counts once for all its outputs."""
        return self.prompt_tokens + self.sequences * self.max_tokens

    @property
    def slots(self) -> int:
        return self.n * self.prompt_tokens + self.sequences * self.max_tokens


def checked_tag(value: object, field: str = "metadata.tag") -> str:
    if isinstance(value, str) and _TAG.fullmatch(value):
        return value
    shown = value[:80] if isinstance(value, str) else value
    raise ParameterError(field, shown, "1 to 64 letters, digits and _ . : / -, a letter or digit first")


@dataclass
class ServedRequest:
    tag: str | None
    mode: ServedMode
    tokens: int = 0  # of its outputs, so far
    steps: int = 0  # that gave them
    told: bool = False  # there was feedback
    scored: Callable[[float], None] = lambda _: None  # called with its score


class RequestFollower:
    def submitted(self, stream: Updates) -> None:
        """The engine has the request."""

    def update(self, index: int, delta: Delta) -> None:
        """`delta` was added to output `index`, counted over all prompts."""

    def closed(self, record: "RequestRecord") -> None:
        """The request has ended. Called once."""


def _between(begin: str, end: str) -> property:
    def seconds(record: "RequestRecord") -> float | None:
        first, last = getattr(record, begin), getattr(record, end)
        return None if first is None or last is None else max(last - first, 0.0)

    return property(seconds)


class RequestRecord:
    """Follows one request. It must be closed once, however the request ends."""

    def __init__(self, metrics: ServerMetrics, facts: RequestFacts, arrived: float) -> None:
        self.facts, self.arrived = facts, arrived
        self.ended = arrived
        self.reason: FinishReason | None = None  # until it has ended
        self.error: BaseException | None = None  # that ended it
        self.queued: float | None = None  # seconds from submission to the first row in a step
        self.first_token: float | None = None  # moments; None: there was none
        self.last_token: float | None = None
        self.tokens = [0] * facts.sequences  # of each output
        self.verify_steps = 0  # of one output each, with a tree
        self.drafted = 0  # nodes of these trees
        self.accepted = 0  # of them
        self.accepted_by_origin: Counter[str] = Counter()
        self.guessable = self.sharing = 0  # steps that asked for guesses, and who shared these, summed
        self.late = 0  # steps of one output each whose drafter was asked for a tree and had none
        self.tried_by_depth, self.accepted_by_depth = [0] * DEPTHS, [0] * DEPTHS  # trees, as in `rollout.outcome`
        #: Called with each step of an output, and the seconds since its step before; None: there was none.
        self.observe_step: Callable[[Verified, float | None], None] = lambda *_: None
        self.handovers: list[HandOverReport] = []
        self.cascade = CascadeAnswer()  # who answers, where the request is for a cascade
        self.served = ServedRequest(facts.tag, facts.mode)
        self.followers: list[RequestFollower] = []
        self._metrics = metrics
        self._steps: list[float | None] = [None] * facts.sequences  # of each output's newest tokens: the target's clock
        self._reasons: set[FinishReason] = set()
        metrics["pilotfish_requests_in_flight"].inc()

    def submitted(self, stream: Updates) -> None:
        for follower in self.followers:
            follower.submitted(stream)

    def update(self, index: int, delta: Delta, now: float) -> None:
        prompt, output = divmod(index, self.facts.n)
        if delta.queued is not None and output == 0:  # its first, and that of its prompt
            handed_over = sum(report.tokens for report in delta.handovers)
            self._metrics.prefix(self.facts.prompts[prompt], delta.cached, handed_over)
        self.queued = delta.queued if self.queued is None else self.queued
        if delta.tokens:
            self._add_tokens(index, len(delta.tokens), now)
        for verified in delta.verified:
            self._verify(index, verified)
        for report in delta.handovers:
            self.handovers.append(report)
            self._metrics.handover(report)
        if delta.finish is not None:
            self._reasons.add(delta.finish.reason)
        for follower in self.followers:
            follower.update(index, delta)

    def _add_tokens(self, index: int, count: int, now: float) -> None:
        if self.first_token is None:
            self.first_token = now
            self._metrics["vllm:time_to_first_token_seconds"].observe(now - self.arrived)
            self._metrics["vllm:prompt_tokens"].inc(self.facts.prompt_tokens)
        self.last_token = now
        self.tokens[index] += count
        self.served.tokens += count

    def _verify(self, index: int, verified: Verified) -> None:
        if verified.nodes:
            self.verify_steps += 1
            self.drafted += verified.nodes
            self.accepted += verified.accepted
            self.accepted_by_origin.update(verified.origins)
            for depth in range(min(max(verified.depth, verified.accepted), DEPTHS)):
                self.tried_by_depth[depth] += verified.accepted >= depth
                self.accepted_by_depth[depth] += verified.accepted > depth
        if verified.tokens:
            self.served.steps += 1
            self.late += verified.late
            self.guessable += verified.sharing > 0
            self.sharing += verified.sharing
            before, self._steps[index] = self._steps[index], verified.at
            since = None if before is None or verified.resumed else verified.at - before
            if since is not None:
                self._metrics["vllm:inter_token_latency_seconds"].observe(since)
            self.observe_step(verified, since)

    def close(self, error: BaseException | None) -> None:
        self.error = error
        gone = isinstance(error, ClientGone | asyncio.CancelledError)
        self.finish(time.monotonic(), None if error is None else FinishReason.ABORT if gone else FinishReason.ERROR)
        for follower in self.followers:
            follower.closed(self)
        self.error = None  # its traceback holds all that was asked and answered

    def finish(self, now: float, reason: FinishReason | None = None) -> None:
        self.ended, self.reason = now, reason or self._worst_reason()
        self.served.mode = self.cascade.side or self.served.mode
        facts, metrics, ended_by = self.facts, self._metrics, str(self.reason)
        labels = (metrics.label(facts.tag), facts.mode, facts.output)
        metrics["pilotfish_requests_in_flight"].dec()
        metrics["vllm:request_success", ended_by].inc()
        metrics["pilotfish_requests", *labels, ended_by].inc()
        if facts.mode != "cascade":
            metrics["pilotfish_variant_requests", facts.variant, ended_by].inc()
        elif (side := self.cascade.side) is not None:
            metrics["pilotfish_cascade_requests", side, self.cascade.reason].inc()
        metrics["pilotfish_request_tokens", *labels, "prompt"].inc(facts.prompt_tokens)
        metrics["pilotfish_request_tokens", *labels, "generation"].inc(self.generation_tokens)
        metrics.observe_ended(self, labels)

    def _worst_reason(self) -> FinishReason:
        if FinishReason.LENGTH in self._reasons and FinishReason.ABORT not in self._reasons:
            return FinishReason.LENGTH
        return FinishReason.STOP if self._reasons == {FinishReason.STOP} else FinishReason.ABORT

    # -- figures, once it has ended. Times are seconds; None: the request never came so far.

    @property
    def generation_tokens(self) -> int:
        return sum(self.tokens)

    @property
    def longest(self) -> int:
        return max(self.tokens)

    @property
    def acceptance_rate(self) -> float | None:
        return self.accepted / self.drafted if self.verify_steps else None

    @property
    def accepted_per_verify_step(self) -> float | None:
        return self.accepted / self.verify_steps if self.verify_steps else None

    @property
    def handed_over(self) -> int | None:
        return sum(report.tokens for report in self.handovers) if self.handovers else None

    @property
    def scheduled(self) -> float:
        return self.arrived + (self.queued or 0.0)

    latency = _between("arrived", "ended")
    time_to_first_token = _between("arrived", "first_token")
    prefill = _between("scheduled", "first_token")
    decode = _between("first_token", "last_token")
    inference = _between("scheduled", "last_token")

    @property
    def time_per_output_token(self) -> float | None:
        return None if self.decode is None or self.longest < 2 else self.decode / (self.longest - 1)
