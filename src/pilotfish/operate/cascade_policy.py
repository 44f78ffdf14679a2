"""The cascade's file (docs/cascade.md) decides which model answers:

tag, length ─────────────────────────────────────────────► large
else ─► small: the first tokens of every output ─► unsure ─► large, from the beginning
                                                 └ sure ───► small, to the end
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import asdict

from pilotfish.validation import parsed_toml

#: Why the large model answers.
Escalation = Literal["tag", "length", "confidence", "unavailable"]
Side = Literal["small", "large"]
MAX_NAME = 128
#: Tokens of an output that are judged, at most.
MAX_JUDGED = 256
#: Stands for minus infinity, which JSON does not know.
LEAST = -9999.0
#: A threshold that no mean reaches: the large model answers all.
NOBODY = 1.0


class SmallModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """None: as the server's own engine, or as that is planned."""

    target: str  # its directory
    pools: list[str] = []  # addresses of targets that serve it; none: one is started here
    keys: list[str] = []  # their public keys
    dtype: str | None = None
    device: str | None = None
    quantization: str | None = None
    kv_dtype: str | None = None
    threads: int | None = None
    cores: str | None = None
    kv_slots: int | None = None
    memory: float | None = None  # GiB
    max_model_len: int | None = None
    max_requests: int | None = None
    max_rows: int | None = None
    pace: str | None = None

    @property
    def engine_fields(self) -> dict[str, Any]:
        own = ("target", "pools", "keys")
        return {name: value for name, value in asdict(self).items() if name not in own and value is not None}


class CascadePolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    small: SmallModelConfig
    threshold: float
    tags: list[str] = []
    longest: int | None = None
    tokens: int = 16

    def rule(self, tag: str | None, prompt_tokens: int) -> Escalation | None:
        """Why the large model answers in any case; None: it need not. The longest prompt counts."""
        if tag is not None and tag in self.tags:
            return "tag"
        return "length" if self.longest is not None and prompt_tokens > self.longest else None


class Confidence:
    """By the mean log-probability of each output's first `tokens`, or all. The least sure output decides."""

    def __init__(self, outputs: int, tokens: int, threshold: float) -> None:
        self.value: float | None = None  # of the outputs that are judged
        self._tokens, self._threshold = tokens, threshold
        self._sums, self._counts = [0.0] * outputs, [0] * outputs
        self._open = set(range(outputs))  # not judged yet

    def add(self, output: int, logprobs: Sequence[float], *, ended: bool) -> None:
        if output not in self._open:
            return
        taken = [max(one, LEAST) for one in logprobs[: self._tokens - self._counts[output]]]
        self._sums[output] += math.fsum(taken)
        self._counts[output] += len(taken)
        if ended or self._counts[output] == self._tokens:
            self._open.discard(output)
            mean = self._sums[output] / max(self._counts[output], 1)
            self.value = mean if self.value is None else min(self.value, mean)

    @property
    def verdict(self) -> Literal["stay", "escalate"] | None:
        if self.value is not None and self.value < self._threshold:
            return "escalate"
        return None if self._open else "stay"


@dataclass
class CascadeAnswer:
    answered_by: str | None = None  # the model's name
    escalated: Escalation | None = None
    confidence: float | None = None  # the small model's, where it was judged

    @property
    def side(self) -> Side | None:
        if self.answered_by is None:
            return None
        return "small" if self.escalated is None else "large"

    @property
    def surprisal(self) -> float | None:
        return None if self.confidence is None else -self.confidence

    @property
    def reason(self) -> str:
        return self.escalated or "sure"


def read_cascade(text: str) -> CascadePolicy:
    """ParameterError names the bad field of the TOML file."""
    return parsed_toml("cascade", text, CascadePolicy, _faults)


def _faults(policy: CascadePolicy) -> Iterator[tuple[str, object, str]]:
    if not (1 <= len(policy.name) <= MAX_NAME and policy.name.isprintable()):
        yield "cascade.name", policy.name[:MAX_NAME], f"1 to {MAX_NAME} printable characters"
    if not LEAST <= policy.threshold <= NOBODY:  # no number is neither
        yield "cascade.threshold", policy.threshold, f"a mean log-probability, {LEAST:g} to {NOBODY:g}"
    if not 1 <= policy.tokens <= MAX_JUDGED:
        yield "cascade.tokens", policy.tokens, f"an integer 1 to {MAX_JUDGED}"
    if policy.longest is not None and policy.longest < 1:
        yield "cascade.longest", policy.longest, "1 or more"
    if not policy.small.target:
        yield "cascade.small.target", policy.small.target, "a model's directory"
    if policy.small.keys and not policy.small.pools:
        yield "cascade.small.keys", policy.small.keys, "none without pools"
