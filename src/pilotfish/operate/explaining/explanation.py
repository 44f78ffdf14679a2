from typing import Literal

from msgspec import Struct

from pilotfish.operate.explaining.causes import Factor, Part
from pilotfish.operate.explaining.cohorts import SUMS
from pilotfish.operate.explaining.paired import CellSums

Verdict = Literal["changed", "same", "unclear"]
Kind = Literal["mix", "drift", "draft", "client", "variant", "temperature", "structured", "context", "late", "wanted"]


class CohortFigures(Struct, frozen=True, kw_only=True):
    """None: there was nothing to divide by."""

    requests: int
    cut: int  # requests beside these, whose variant was cut
    share: float  # of the window's steps
    accepted_per_step: float | None
    wanted: float | None  # steps that wanted a tree, of all
    late: float | None  # of those: had none in time
    accepted_per_tree: float | None
    nodes_per_tree: float | None
    tokens_per_step: float | None
    load: float | None  # sequences that shared a step that asked for guesses, in the mean
    by_depth: tuple[float | None, ...]  # of the guesses whose path was accepted up to there, those that were accepted
    reached: tuple[float | None, ...]  # trees that came to try this depth, of all

    @classmethod
    def of(cls, sums: CellSums, steps: float) -> "CohortFigures":
        count = {name: float(sums[name][0]) for name in SUMS}
        wanted = count["trees"] + count["late"]
        tried, accepted = (sums.by_depth(name)[0].tolist() for name in ("tried_by_depth", "accepted_by_depth"))
        return cls(
            requests=int(count["requests"]),
            cut=int(count["cut"]),
            share=count["steps"] / steps,
            accepted_per_step=_ratio(count["accepted"], count["steps"]),
            wanted=_ratio(wanted, count["steps"]),
            late=_ratio(count["late"], wanted),
            accepted_per_tree=_ratio(count["accepted"], count["trees"]),
            nodes_per_tree=_ratio(count["nodes"], count["trees"]),
            tokens_per_step=_ratio(count["tokens"], count["steps"]),
            load=_ratio(count["sharing"], count["guessable"]),
            by_depth=tuple(_ratio(part, whole) for part, whole in zip(accepted, tried, strict=True)),
            reached=tuple(_ratio(part, count["trees"]) for part in tried),
        )


class DepthLoss(Struct, frozen=True, kw_only=True):
    depth: int  # from 1
    before: float
    after: float


class DimensionParts(Struct, frozen=True, kw_only=True):
    """Accepted tokens a step, which add up to the change (`rollout.decomposition`)."""

    dimension: str  # "all": cohorts by all dimensions together
    mix: float
    within: float
    interaction: float


class Cause(Struct, frozen=True, kw_only=True):
    """Effects are accepted tokens a step. Figures are those of the requests with the values, or of all."""

    kind: Kind
    part: Part  # whether shares of cohorts changed, or rates within them
    factor: Factor
    dimension: str | None  # None: everywhere
    values: tuple[str, ...]
    effect: float
    share: float  # of the change; below 0 where it worked against it
    before: CohortFigures
    after: CohortFigures
    depth: DepthLoss | None  # None: it is not about whether guesses are right
    alike: tuple[str, ...]  # dimensions that would explain it as well
    sentence: str = ""
    advice: str = ""


class Explanation(Struct, frozen=True, kw_only=True):
    """`change`, accepted tokens a step, is the sum of the causes' effects and `rest`; `error`: its standard error."""

    verdict: Verdict
    sentence: str
    before: CohortFigures | None = None  # None: nothing ended in one of the windows
    after: CohortFigures | None = None
    change: float = 0.0
    error: float = 0.0
    causes: tuple[Cause, ...] = ()
    rest: float = 0.0
    parts: tuple[DimensionParts, ...] = ()


def depth_loss(before: CohortFigures, after: CohortFigures) -> DepthLoss | None:
    """The depth with the greatest change of its share, times the trees that reached it before."""
    down = (after.accepted_per_tree or 0.0) < (before.accepted_per_tree or 0.0)
    found: list[tuple[float, DepthLoss]] = []
    depths = zip(before.by_depth, after.by_depth, before.reached, strict=True)
    for depth, (old, new, reached) in enumerate(depths, start=1):
        if old is not None and new is not None and reached is not None:
            loss = (old - new) * reached
            found.append((loss if down else -loss, DepthLoss(depth=depth, before=old, after=new)))
    return max(found, key=lambda one: one[0], default=(0.0, None))[1]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
