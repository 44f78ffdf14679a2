"""How the speculation of an output went: vLLM's `metrics.speculative_decoding`, and beside it who guessed what; our
`pilotfish` object."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from pilotfish.server.answers import Acceptance, Metrics
from pilotfish.server.job import Growth, Plan
from pilotfish.wire.serving import Verified


def metrics(plan: Plan, verified: Sequence[Verified]) -> Metrics | UnsetType:
    """Of the only output; as in vLLM there are none of several."""
    if plan.metrics == "none":
        return UNSET
    steps = [step for step in verified if step.nodes] if plan.outputs == 1 else []
    if not steps:
        return Metrics(None)
    origins = Counter(origin for step in steps for origin in step.origins)
    return Metrics(
        acceptance(steps, plan.spec_tokens, detailed=plan.metrics == "detailed"), dict(origins) if origins else UNSET
    )


def acceptance(steps: Sequence[Verified], spec_tokens: int, *, detailed: bool) -> Acceptance:
    """Of at least one step."""
    accepted, drafted = sum(step.accepted for step in steps), sum(step.nodes for step in steps)
    by_length: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for step in steps:
        by_length[step.nodes][step.accepted] += 1
    return Acceptance(
        mean_acceptance_length=1 + accepted / len(steps),
        draft_acceptance_rate=accepted / drafted,
        acceptance_histogram=dict(sorted(Counter(step.accepted for step in steps).items())),
        acceptance_histogram_by_draft_length={n: dict(sorted(by_length[n].items())) for n in sorted(by_length)},
        num_spec_steps=len(steps),
        num_accepted_draft_tokens=accepted,
        num_draft_tokens=drafted,
        num_spec_tokens=spec_tokens,
        per_step_accepted=[step.accepted for step in steps] if detailed else UNSET,
        per_step_drafted=[step.nodes for step in steps] if detailed else UNSET,
    )


def detail(plan: Plan, growth: Growth) -> Any:
    """Of one event of a stream."""
    if not plan.detail:
        return UNSET
    delta = growth.delta
    return {"tokens": delta.tokens, "ends": delta.ends, "verified": delta.verified, "steps": growth.update.steps}
