"""How much to speculate, per step, by measured costs: rows and draft time go where they buy the most tokens a second.

                 sequences + sum of the chances of the nodes verified
goodput(rows) = ------------------------------------------------------
                   seconds of a forward of `rows` + seconds of drafting
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

import numpy as np

from pilotfish.core.drafting.drafter import NO_GUESSES, DraftLimits
from pilotfish.core.scheduling.calibration import Calibration, GainCurve, LevelCurve, SecondsBySize, StepCosts
from pilotfish.core.scheduling.step import RequestCommit, Step
from pilotfish.core.trees.tree import Floats, Forest, Ints

#: Nodes that a step may verify, over all its sequences together.
BUCKETS = (0, 1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


@dataclass(frozen=True)
class StepLoad:
    sequences: int
    rows: int
    room: int
    context: int = 0  # tokens of the sequences


@dataclass(frozen=True)
class StepTime:
    load: StepLoad
    limits: DraftLimits
    drafting: float  # seconds
    rest: float  # until the drafter was told of the commits


class Budget(Protocol):
    """Decides before drafting and before verifying, and learns from the outcome. Times are in seconds."""

    def limits(self, load: StepLoad, now: float) -> DraftLimits:
        """Limits on drafting in this step."""

    def nodes(self, load: StepLoad, offered: Forest, draft_seconds: float, levels: int) -> int:
        """How many of the best nodes to verify. Drafting took `draft_seconds` and `levels` forwards."""

    def observe(self, step: Step, commits: Sequence[RequestCommit], time: StepTime) -> None:
        """The next step may have begun."""


class FixedBudget:
    """Every tree in full: for comparisons, and targets whose cost is not the device's."""

    def __init__(self, nodes: int, levels: int) -> None:
        self._nodes, self._levels = nodes, levels

    def limits(self, load: StepLoad, now: float) -> DraftLimits:  # noqa: ARG002
        return DraftLimits(self._nodes, self._nodes * load.sequences, self._levels, price=0.0)

    def nodes(self, load: StepLoad, offered: Forest, draft_seconds: float, levels: int) -> int:  # noqa: ARG002
        return self._nodes * load.sequences

    def observe(self, step: Step, commits: Sequence[RequestCommit], time: StepTime) -> None:
        """Nothing is learned."""


class Effort(Enum):
    NONE = "none"
    FREE = "free"  # n-gram and suffix nodes
    DRAFT = "draft"  # and the draft model's


@dataclass(frozen=True)
class Choice:
    effort: Effort
    bucket: int


class AdaptiveBudget:
    """Effort and bucket change only when another choice's expected goodput is better by `MARGIN`, and in steady load at
    most once in `DWELL` seconds. Inside the bucket a step takes as many nodes as its own trees are worth. Where rows of
    prompts leave no room for nodes nothing is drafted.

    Other efforts, and full trees of the chosen one, are tried for `PROBE_STEPS` steps, first after `FIRST_PROBE`
    seconds, then at doubled distances up to `LAST_PROBE`, so that they come back when the text becomes predictable;
    later where trials would lose more than a hundredth of the time. A draft elsewhere that rested first reads what was
    written meanwhile: until most sequences have a tree, for at most `PATIENCE` seconds, nothing is learned of it.
    """

    MARGIN, DWELL = 0.03, 1.0
    PROBE_STEPS, FIRST_PROBE, LAST_PROBE, PATIENCE = 4, 2.0, 8.0, 2.0
    FIRST_STEPS = 16  # of drafting, then half as many without, before anything is decided
    REVIEW = 0.05  # seconds for which an expectation holds while as many sequences sample

    def __init__(self, nodes: int, levels: int, costs: StepCosts, level_seconds: float) -> None:
        """At most `nodes` a tree and `levels` of drafting, each expected to take `level_seconds`."""
        self._nodes, self._levels = nodes, levels
        self._costs = costs
        self._calibration = Calibration()
        self._gains = {Effort.FREE: GainCurve(nodes, 0.02, 0.5), Effort.DRAFT: GainCurve(nodes, 0.8, 0.7)}
        self._levels_taken = LevelCurve(nodes, levels)
        self._level_seconds = {Effort.FREE: SecondsBySize(0.0), Effort.DRAFT: SecondsBySize(level_seconds)}
        self.choice = Choice(Effort.DRAFT, nodes)
        self.changes = 0
        self._changed_at = -self.DWELL
        self._sequences, self._reviewed_at = 0, 0.0  # at the last review
        self._probes = Probes(self.FIRST_STEPS, self.PROBE_STEPS, self.FIRST_PROBE, self.LAST_PROBE)
        self._effort = self._asked_for = Effort.NONE  # of this step; of the last one with room for nodes
        self._probing = self._resumed = False  # whether this step is of a trial; and its draft had to catch up
        self._total = 0  # nodes that this step may verify
        self._now = self._awaited_until = 0.0  # of this step; when a draft that rested must have read
        self._price = 0.0  # tokens a second that its time is worth

    # -- before drafting

    def limits(self, load: StepLoad, now: float) -> DraftLimits:
        if not load.sequences:
            return NO_GUESSES
        probed = self._probes.effort(self.choice.effort, now) if load.room else None
        if load.sequences != self._sequences or now - self._reviewed_at >= self.REVIEW:
            alone = replace(load, rows=load.sequences)  # prompts pass; a choice made beside one would outlast it
            self._review(alone, now, may_change=probed is None)
        before, self._effort = self._effort, (probed or self.choice.effort) if load.room else Effort.NONE
        self._resumed = before is not Effort.DRAFT
        if load.room and self._asked_for is not Effort.DRAFT:
            self._awaited_until = now + self.PATIENCE
        self._now, self._asked_for = now, self._effort if load.room else self._asked_for
        if probed in self._gains and not self._probing:
            self._forget(probed, 0 if before is not probed else self._asked(self.choice.bucket, load))
            if probed is Effort.DRAFT and self._resumed:  # or nothing that it is sure of is ever verified again
                self._calibration.forget()
        self._probing = probed is not None
        self._total = self._nodes * load.sequences if probed else self.choice.bucket
        levels = self._levels if self._effort is Effort.DRAFT else 0
        return DraftLimits(min(self._nodes, self._total), self._total, levels, self._price, self._probing)

    def _review(self, load: StepLoad, now: float, *, may_change: bool) -> None:
        expected = self._expected(load)
        if may_change:
            self._choose(load, expected, now)
        self._price = expected.get(self.choice, 0.0)
        self._sequences, self._reviewed_at = load.sequences, now

    def _expected(self, load: StepLoad) -> dict[Choice, float]:
        """Tokens a second of every choice whose bucket the trees could fill."""
        largest = self._nodes * load.sequences
        buckets = np.array([*(b for b in BUCKETS if b < largest), largest])
        forward = self._seconds(load, buckets)
        expected = {Choice(Effort.NONE, 0): load.sequences / float(forward[0])}
        for effort, curve in self._gains.items():
            tokens = load.sequences * (1 + curve.gain(buckets / load.sequences))
            levels = self._levels_taken.levels(buckets / load.sequences) if effort is Effort.DRAFT else 1.0
            values = tokens / (forward + self._level_seconds[effort].at(load.sequences) * levels)
            expected |= {Choice(effort, b): v for b, v in zip(buckets.tolist()[1:], values.tolist()[1:], strict=True)}
        return expected

    def _choose(self, load: StepLoad, expected: dict[Choice, float], now: float) -> None:
        best = max(expected, key=lambda choice: expected[choice])
        steady = load.sequences == self._sequences
        if best == self.choice or (steady and now - self._changed_at < self.DWELL):
            return
        if expected[best] < (1 + self.MARGIN) * expected.get(self.choice, 0.0):
            return
        self.choice, self._changed_at = best, now
        self.changes += 1
        self._probes.restart(now)

    # -- before verifying

    def nodes(self, load: StepLoad, offered: Forest, draft_seconds: float, levels: int) -> int:
        if not offered.num_trees or self._effort is Effort.NONE:
            return 0
        chances = self._calibration.chances(offered.nodes.scores)
        if not self._is_awaited(offered, levels):
            asked = self._asked(self._total, load)
            self._gains[self._effort].observe(chances, offered.num_trees, asked)
            if self._effort is Effort.DRAFT:
                likeliest_first = offered.nodes.depths[np.argsort(-chances, kind="stable")]
                self._levels_taken.observe(likeliest_first, offered.num_trees, levels, asked)
        elif self._probing:
            self._probes.repeat(self._effort)
        if not self._resumed:  # or the time has the draft's catching up in it
            self._level_seconds[self._effort].observe(load.sequences, draft_seconds / max(levels, 1))
        return self._worthwhile(load, np.sort(chances)[::-1][: self._total])

    def _is_awaited(self, offered: Forest, levels: int) -> bool:
        """Whether a draft elsewhere, of no levels here, that rested still owes most sequences their trees."""
        owes = self._effort is Effort.DRAFT and not levels and 2 * np.count_nonzero(offered.sizes) < offered.num_trees
        self._awaited_until = self._awaited_until if owes else 0.0
        return self._now < self._awaited_until

    def _asked(self, total: int, load: StepLoad) -> int:
        return min(self._nodes, -(-total // load.sequences))

    def _forget(self, effort: Effort, first: int) -> None:
        self._gains[effort].forget(first)
        if effort is Effort.DRAFT:
            self._levels_taken.forget(first)

    def _worthwhile(self, load: StepLoad, ranked: Floats) -> int:
        tokens = np.concatenate(([0.0], np.cumsum(ranked)))
        return int(np.argmax(tokens - self._price * self._seconds(load, np.arange(len(tokens)))))

    def _seconds(self, load: StepLoad, nodes: Ints) -> Floats:
        """Of forwards with so many nodes."""
        return self._costs.over(load.rows + nodes) + self._costs.context.seconds(load.context, nodes / load.sequences)

    # -- after

    def observe(self, step: Step, commits: Sequence[RequestCommit], time: StepTime) -> None:
        if all(chunk.count == 1 for chunk in step.chunks):  # prompts cost otherwise: few of their rows give logits
            load, price = time.load, time.limits.price
            further = (step.num_rows - load.rows) / max(load.sequences, 1)
            self._costs.observe(step.num_rows, time.rest, float(self._costs.context.seconds(load.context, further)))
            if time.limits.trial and price:
                tokens = sum(len(commit.tokens) for commit in commits)
                self._probes.lose(time.drafting + time.rest - tokens / price)
        scores, accepted = step.forest.nodes.scores, [node for commit in commits for node in commit.path]
        self._calibration.observe(scores, scores[accepted])


class Probes:
    """When to try an effort beside the chosen one, each once at the start. A rested draft in the target's process
    first reads what was written meanwhile: later trials come so seldom that they lose `SHARE` of the time."""

    SHARE, LONGEST = 0.01, 60.0  # seconds from one trial to the next, at most

    def __init__(self, first_steps: int, steps: int, first: float, last: float) -> None:
        self._steps, self._first, self._last = steps, first, last
        self._coming = [Effort.DRAFT] * first_steps + [Effort.NONE] * (first_steps // 2) + [Effort.FREE] * steps
        self._turn = 0
        self._distance = first
        self._due: float | None = None
        self._began = self._lost = 0.0  # the last trial, and the seconds that it lost
        self._earliest = 0.0  # when the next may be, for any choice

    def restart(self, now: float) -> None:
        self._distance = self._first
        self._due = max(now + self._first, self._earliest)

    def effort(self, chosen: Effort, now: float) -> Effort | None:
        if self._due is None:
            self._due = now + self._first
        if not self._coming and now >= self._due:
            # a plain step is all there is to no effort: while that is chosen, it is known
            others = [effort for effort in Effort if effort is not Effort.NONE or chosen is not Effort.NONE]
            self._turn += 1
            self._coming = [others[self._turn % len(others)]] * self._steps
            self._distance = min(2 * self._distance, self._last)
            self._due, self._began, self._lost, self._earliest = now + self._distance, now, 0.0, now
        return self._coming.pop(0) if self._coming else None

    def repeat(self, effort: Effort) -> None:
        self._coming.insert(0, effort)

    def lose(self, seconds: float) -> None:
        if self._turn:
            self._lost += seconds
            self._earliest = self._began + min(max(self._lost, 0.0) / self.SHARE, self.LONGEST)
            self._due = max(self._began + self._distance, self._earliest)
