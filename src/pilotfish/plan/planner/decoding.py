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
    rounds = [_Round(deployment, tree, level, sequences, context) for tree in draft.acceptance.guesses]
    steps = (one.in_turn() if deployment.mode == "sync" else one.beside() for one in rounds)
    return max(steps, key=lambda step: step.speed)


def level_seconds(deployment: Deployment, draft: DraftPlacement, sequences: int, context: float) -> float:
    """Seconds of a draft's forward with the host's part, for all targets that share it."""
    served = sequences if draft.resident else math.ceil(sequences * deployment.replicas / draft.workers)
    width = 1 if deployment.mode == "sync" else WIDTH
    forward = draft.placed.seconds(ForwardLoad(rows=served * width, sequences=served, context=context))
    return forward + draft.placed.engine.level.value


class _Round:
    def __init__(self, deployment: Deployment, tree: GuessedTree, level: float, sequences: int, context: float) -> None:
        rows = sequences * (1 + tree.nodes)
        self.tree, self.level = tree, level
        self.resident = deployment.draft is not None and deployment.draft.resident
        self.forward = deployment.target.parts(ForwardLoad(rows=rows, sequences=sequences, context=context))
        self.host = deployment.target.engine.round.value
        self.exchange = 0.0 if self.resident else deployment.link.exchange(rows * GUESS_BYTES)

    def in_turn(self) -> DecodingStep:
        drafting = self.tree.levels * self.level
        seconds = sync_round(self.forward.seconds, self.level, self.tree.levels, self.host, self.exchange)
        parts = {**_named(self.forward, self.host), "draft": drafting}
        parts["link"] = parts.get("link", 0.0) + self.exchange
        busy = 0.0 if self.resident else drafting
        return DecodingStep(seconds=seconds, tokens=1 + self.tree.gained, parts=parts, tree=self.tree, draft_busy=busy)

    def beside(self) -> DecodingStep:
        """As deep as pays. A step commits no more tokens than levels are grown beside it: the tree must not shrink."""
        verify, wanted = self.forward.seconds, 1 + STALE * self.tree.gained
        depths = {levels_hidden(verify, self.level, self.exchange), *range(1, self.tree.levels + 2)}
        both = {depth: max(verify, depth * self.level + self.exchange) for depth in depths}
        timed = [(rerooted_round(both[depth], self.level, depth, SURVIVES, self.host), depth) for depth in depths]
        seconds, depth = max(timed, key=lambda one: min(wanted, one[1]) / one[0])
        waited = max(0.0, seconds - verify - self.host)
        return DecodingStep(
            seconds=seconds,
            tokens=min(wanted, float(depth)),
            parts={**_named(self.forward, self.host), "draft": waited},
            tree=self.tree,
            draft_busy=min(depth * self.level, seconds),
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
