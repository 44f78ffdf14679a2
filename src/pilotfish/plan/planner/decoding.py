import math
from collections.abc import Mapping

from msgspec import Struct

from pilotfish.config.hardware.cost import ForwardLoad, ForwardParts, PlacedModel
from pilotfish.plan.planner.acceptance import GuessedTree
from pilotfish.plan.planner.deployment import Deployment, DraftPlacement
from pilotfish.plan.published import PUBLISHED
from pilotfish.plan.rounds import levels_hidden, rerooted_round, sync_round

#: Bytes on the wire of a guess, and of a sequence's news from a target: ids and places, no scores.
GUESS_BYTES = 16
#: Leaves of a sequence that a level of an asynchronous draft expands, as in SwiftSpec.
WIDTH = 8
#: Share of the tokens gained by synchronous guesses that asynchronous ones gain (SwiftSpec).
STALE = PUBLISHED["swiftspec-acceptance"].published or 1.0
#: Assumed chance that a tree survives a step: SSD's paper has up to 0.9 of the outcomes prepared.
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
    """A plain step where no guesses are faster: the server's rule."""
    plain = plain_step(deployment.target, sequences, context)
    guessed = speculative_step(deployment, sequences, context)
    return plain if guessed is None or guessed.speed < plain.speed else guessed


def speculative_step(deployment: Deployment, sequences: int, context: float) -> DecodingStep | None:
    draft = deployment.draft
    if draft is None:
        return None
    level = level_seconds(deployment, draft, sequences, context)
    steps = (_guessed(deployment, draft, tree, level, sequences, context) for tree in draft.acceptance.guesses)
    return max(steps, key=lambda step: step.speed)


def level_seconds(deployment: Deployment, draft: DraftPlacement, sequences: int, context: float) -> float:
    """Seconds of a draft's forward with the host's part, for all targets that share it."""
    served = sequences if draft.resident else math.ceil(sequences * deployment.replicas / draft.workers)
    width = 1 if deployment.mode == "sync" else WIDTH
    forward = draft.placed.seconds(ForwardLoad(rows=served * width, sequences=served, context=context))
    return forward + draft.placed.engine.level.value


def _guessed(
    deployment: Deployment, draft: DraftPlacement, tree: GuessedTree, level: float, sequences: int, context: float
) -> DecodingStep:
    """Async: as deep as pays. A step commits no more tokens than levels are grown beside it: the tree must not
    shrink."""
    rows, host = sequences * (1 + tree.nodes), deployment.target.engine.round.value
    forward = deployment.target.parts(ForwardLoad(rows=rows, sequences=sequences, context=context))
    exchange = 0.0 if draft.resident else deployment.link.exchange(rows * GUESS_BYTES)
    verify, parts = forward.seconds, _named(forward, host)
    if deployment.mode == "sync":
        drafting = tree.levels * level
        seconds, tokens = sync_round(verify, level, tree.levels, host, exchange), 1 + tree.gained
        parts |= {"draft": drafting, "link": parts.get("link", 0.0) + exchange}
        busy = 0.0 if draft.resident else drafting
    else:
        wanted = 1 + STALE * tree.gained
        depths = {levels_hidden(verify, level, exchange), *range(1, tree.levels + 2)}
        both = {depth: max(verify, depth * level + exchange) for depth in depths}
        timed = [(rerooted_round(both[depth], level, depth, SURVIVES, host), depth) for depth in depths]
        seconds, depth = max(timed, key=lambda one: min(wanted, one[1]) / one[0])
        tokens, busy = min(wanted, float(depth)), min(depth * level, seconds)
        parts["draft"] = max(0.0, seconds - verify - host)
    return DecodingStep(seconds=seconds, tokens=tokens, parts=parts, tree=tree, draft_busy=busy)


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
