"""What a server tells of speculation: in its answers, as vLLM, Pilotfish and llama.cpp do, or in its counters."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from pilotfish.cli.bench.serving.client import Answer

#: vLLM's counters, which others have with a prefix of their own.
COUNTERS = {
    "steps": "spec_decode_num_drafts_total",
    "drafted": "spec_decode_num_draft_tokens_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
}


class Accepted(Struct, frozen=True):
    """Drafts of an answer, or of many: chains or trees."""

    drafted: int  # tokens that were guessed
    accepted: int  # of them
    steps: int | None = None  # verify steps with a draft; llama.cpp does not tell
    by_length: Mapping[int, int] = {}  # of them, by how many tokens each has accepted

    def row(self) -> dict[str, Any]:
        """Figures: an acceptance length counts the target's own token too."""
        length = {"acceptance_length": 1 + self.accepted / self.steps} if self.steps else {}
        rate = {"acceptance_rate": self.accepted / self.drafted} if self.drafted else {}
        return {"steps": self.steps, "drafted": self.drafted, "accepted": self.accepted, **length, **rate}

    def by_depth(self) -> dict[str, list[int]]:
        """Steps whose accepted path is at least so deep, from 1; each step counts as offered at each depth, as in
        vLLM's rate by position."""
        deepest = max(self.by_length, default=0)
        accepted = [sum(n for length, n in self.by_length.items() if length > d) for d in range(deepest)]
        return {"offered": [self.steps or 0] * deepest, "accepted": accepted}


def accepted_of(answer: Answer) -> Accepted | None:
    """None where the answer does not tell, or nothing was guessed for it."""
    for event in reversed(answer.events):
        told = (event.data.get("metrics") or {}).get("speculative_decoding")
        if told:
            histogram = {int(k): int(n) for k, n in (told.get("acceptance_histogram") or {}).items()}
            steps, drafted = told["num_spec_steps"], told["num_draft_tokens"]
            return Accepted(drafted, told["num_accepted_draft_tokens"], steps, histogram)
        timings = event.data.get("timings") or {}
        if timings.get("draft_n"):
            return Accepted(timings["draft_n"], timings.get("draft_n_accepted", 0))
    return None


def total_accepted(found: Iterable[Accepted | None]) -> Accepted | None:
    """Of all that tell; None where none does."""
    told = [one for one in found if one is not None]
    if not told:
        return None
    steps = [one.steps for one in told if one.steps is not None]
    by_length = sum((Counter(one.by_length) for one in told), Counter[int]())
    return Accepted(
        sum(one.drafted for one in told),
        sum(one.accepted for one in told),
        sum(steps) if len(steps) == len(told) else None,
        dict(sorted(by_length.items())),
    )


def counted(before: str, after: str) -> Accepted | None:
    """Of all that a server did between two looks at its metrics; None where they do not tell."""
    was, now = _sums(before), _sums(after)
    if not all(name in now for name in COUNTERS):
        return None
    steps, drafted, accepted = (int(now[name] - was.get(name, 0)) for name in COUNTERS)
    return Accepted(drafted, accepted, steps)


def _sums(text: str) -> dict[str, float]:
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError:  # another format
        return {}
    named = [(sample.name.rpartition(":")[2], sample.value) for sample in samples]
    values = {name: [value for own, value in named if own == suffix] for name, suffix in COUNTERS.items()}
    return {name: sum(own) for name, own in values.items() if own}
