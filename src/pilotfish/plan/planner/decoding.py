"""A step of a target with some sequences: its seconds and what they go to, and the tokens that each sequence gets."""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct

from pilotfish.config.hardware.cost import ForwardLoad, ForwardParts, PlacedModel
from pilotfish.plan.planner.acceptance import GuessedTree
from pilotfish.plan.planner.deployment import Deployment, DraftPlacement
from pilotfish.plan.published import PUBLISHED
from pilotfish.plan.rounds import levels_hidden, rerooted_round, sync_round

#: Bytes of a guess on the wire, and of what a target tells of a sequence: ids and places, no scores.
GUESS_BYTES = 16
#: Leaves of a sequence that a level of an asynchronous draft expands, as in SwiftSpec.
WIDTH = 8
#: Of the tokens that guesses in turn gain, what guesses beside the target do (SwiftSpec).
STALE = PUBLISHED["swiftspec-acceptance"].published or 1.0
#: The chance that a tree survives a step, as assumed: SSD's paper has up to 0.9 of the outcomes prepared.
SURVIVES = 0.9


class DecodingStep(Struct, frozen=True, kw_only=True):
    seconds: float
    tokens: float  # of each sequence
    parts: Mapping[str, float]  # seconds by what they go to; they sum to `seconds`
    tree: GuessedTree | None = None  # None: plain decoding
    draft_busy: float = 0.0  # seconds of a draft's devices, where they are its own

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def plain_step(target: PlacedModel, sequences: int, context: float) -> DecodingStep:
    forward = target.parts(ForwardLoad(rows=sequences, sequences=sequences, context=context))
    host = target.engine.step.value
    return DecodingStep(seconds=forward.seconds + host, tokens=1.0, parts=_named(forward, host))


def best_step(deployment: Deployment, sequences: int, context: float) -> DecodingStep:
    """Plain, where no guesses are faster: the server's rule."""
    plain = plain_step(deployment.target, sequences, context)
    guessed = speculative_step(deployment, sequences, context)
    return plain if guessed is None or guessed.speed < plain.speed else guessed


def speculative_step(deployment: Deployment, sequences: int, context: float) -> DecodingStep | None:
    """The fastest of those with guesses; None in mode off."""
    draft = deployment.draft
    if draft is None:
        return None
    level = level_seconds(deployment, draft, sequences, context)
    in_turn = deployment.mode == "sync"
    steps = (
        _sync(deployment, draft, tree, level, sequences, context)
        if in_turn
        else _async(deployment, tree, level, sequences, context)
        for tree in draft.acceptance.guesses
    )
    return max(steps, key=lambda step: step.speed)


def level_seconds(deployment: Deployment, draft: DraftPlacement, sequences: int, context: float) -> float:
    """Of a forward of the draft with the host's part, for the sequences of all targets that share it."""
    served = sequences if draft.resident else math.ceil(sequences * deployment.replicas / draft.workers)
    width = 1 if deployment.mode == "sync" else WIDTH
    forward = draft.placed.seconds(ForwardLoad(rows=served * width, sequences=served, context=context))
    return forward + draft.placed.engine.level.value


def _verify(target: PlacedModel, tree: GuessedTree, sequences: int, context: float) -> ForwardParts:
    load = ForwardLoad(rows=sequences * (1 + tree.nodes), sequences=sequences, context=context)
    return target.parts(load)


def _sync(
    deployment: Deployment, draft: DraftPlacement, tree: GuessedTree, level: float, sequences: int, context: float
) -> DecodingStep:
    forward, host = _verify(deployment.target, tree, sequences, context), deployment.target.engine.round.value
    exchange = 0.0 if draft.resident else deployment.link.exchange(sequences * (1 + tree.nodes) * GUESS_BYTES)
    seconds = sync_round(forward.seconds, level, tree.levels, host, exchange)
    parts = {**_named(forward, host), "draft": tree.levels * level}
    parts["link"] = parts.get("link", 0.0) + exchange
    busy = 0.0 if draft.resident else tree.levels * level
    return DecodingStep(seconds=seconds, tokens=1 + tree.gained, parts=parts, tree=tree, draft_busy=busy)


def _async(deployment: Deployment, tree: GuessedTree, level: float, sequences: int, context: float) -> DecodingStep:
    """As deep as pays. A tree cannot gain a level less in each step than the target takes from it, so that a step
    commits no more tokens than levels are grown beside it."""
    forward, host = _verify(deployment.target, tree, sequences, context), deployment.target.engine.round.value
    exchange = deployment.link.exchange(sequences * (1 + tree.nodes) * GUESS_BYTES)
    wanted = 1 + STALE * tree.gained
    depths = {levels_hidden(forward.seconds, level, exchange), *range(1, tree.levels + 2)}
    beside = [(max(forward.seconds, depth * level + exchange), depth) for depth in depths]
    timed = [(rerooted_round(both, level, depth, SURVIVES, host), depth) for both, depth in beside]
    seconds, depth = max(timed, key=lambda one: min(wanted, one[1]) / one[0])
    waited = max(0.0, seconds - forward.seconds - host)
    return DecodingStep(
        seconds=seconds,
        tokens=min(wanted, float(depth)),
        parts={**_named(forward, host), "draft": waited},
        tree=tree,
        draft_busy=min(depth * level, seconds),
    )


def _named(forward: ForwardParts, host: float) -> dict[str, float]:
    return {
        "weights": forward.weights,
        "compute": forward.products,
        "KV": forward.kv,
        "all-reduces": forward.all_reduces,
        "layers": forward.layers,
        "host": host,
        **({"link": forward.exchange} if forward.exchange else {}),
    }
