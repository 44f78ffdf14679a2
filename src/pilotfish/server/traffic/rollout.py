"""The way of a request through the rollout:

admit ─► choose: a variant, as the file and the guard have it ─► begin ─► GuidedRequest
                                                                            │ steps: the guard's readings
look, each second ─► guard: cuts and trials ─► running requests revised     │ closed: an RequestOutcome
                                                                            ▼
                                                   sums by variant, sums by cohort and minute
"""

import dataclasses
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from pilotfish.core.scheduling.request import FinishReason
from pilotfish.engine.targets.stream import Updates
from pilotfish.errors import ParameterError
from pilotfish.files import file_text
from pilotfish.operate.arms import RolloutArms
from pilotfish.operate.explaining.cohorts import CohortStatistics, CohortWindows
from pilotfish.operate.guarding.guard import Guard, GuardedVariant, GuardEvent
from pilotfish.operate.guarding.guard_readings import GuardReading
from pilotfish.operate.outcome import NONE, Cohort, RequestOutcome
from pilotfish.operate.variants import ONE_VARIANT, Variant, Variants, read_variants, unit
from pilotfish.server.observe.metrics import ServerMetrics
from pilotfish.server.observe.request_records import RequestFollower, RequestRecord
from pilotfish.server.traffic.canary import ReplayedRequest
from pilotfish.wire.serving import Delta, Verified

logger = logging.getLogger(__name__)

PERIOD = 1.0  # seconds between two looks of the guard
ANY = "any"  # of a request that speculates, where it is not known which draft was to guess
WHOLE = (FinishReason.STOP, FinishReason.LENGTH)  # how an output ends that is whole
EVENTS = ("cut", "trial", "restored", "failed trial")  # the guard's actions on a variant
#: Counts of a record that its outcome has by the same names.
COUNTED = ("late", "accepted", "guessable", "sharing", "tried_by_depth", "accepted_by_depth")
CONSTRAINED = ("json", "grammar")  # outputs that have a form, which the end of `max_tokens` may break
#: Of one output, and the seconds since its step before; None: there was none.
ObservedStep: TypeAlias = tuple[Verified, float | None]


@dataclass(frozen=True)
class VariantChoice:
    variant: Variant
    max_nodes: int | None  # 0: not at all; None: as its target is configured
    cut: bool = False  # its variant is cut, and it does not speculate
    pinned: bool = False  # it counts in no comparison
    named: bool = False  # whether the answer says which

    @property
    def declined(self) -> bool:
        """Its client refuses guesses that its variant has, so the request says nothing about the variant."""
        return self.max_nodes == 0 and not self.cut and self.variant.mode == "on"


@dataclass(eq=False)
class GuidedRequest(RequestFollower):
    choice: VariantChoice
    cohort: Cohort
    ended: "Callable[[GuidedRequest, RequestRecord], None]"
    cut: bool  # for a part of it at least
    replay: ReplayedRequest | None = None  # where the canary may want it, without its output
    tokens: list[int] = field(default_factory=list)  # of it, for the canary
    seed: int | None = None
    stream: Updates | None = None  # once it is submitted
    counted: bool = True  # False: nothing is concluded from it
    pool: str = ""  # that guessed for it at first

    def submitted(self, stream: Updates) -> None:
        self.stream = stream
        if self.cut and not self.choice.cut:
            stream.revise(0)

    def update(self, index: int, delta: Delta) -> None:  # noqa: ARG002
        self.pool = self.pool or delta.pool
        if self.replay is not None:
            self.tokens += delta.tokens
            self.seed = delta.seed if self.seed is None else self.seed

    def replayed(self) -> ReplayedRequest | None:
        if self.replay is None or self.seed is None:
            return None
        params = dataclasses.replace(self.replay.params, seed=self.seed)
        return dataclasses.replace(self.replay, params=params, output=self.tokens)

    def closed(self, record: RequestRecord) -> None:
        self.ended(self, record)

    def cut_short(self) -> None:
        self.cut = True
        if self.stream is not None:
            self.stream.revise(0)


class RolloutState(RolloutArms, kw_only=True):
    """What an operator sees: the sums by variant, and the rest."""

    file: str | None  # None: there is one variant
    variants: list[Variant]
    shares: dict[str, float | None]  # now, by variant; None: what the others leave
    guard: dict[str, GuardedVariant]  # by variant, all but the holdout
    events: list[GuardEvent]  # the newest last


class Rollout:
    """`wall` gives seconds since the epoch."""

    def __init__(self, file: Path | None, metrics: ServerMetrics, wall: Callable[[], float] = time.time) -> None:
        self.file = file
        self.variants = ONE_VARIANT if file is None else read_file(file)
        self.guard = Guard(self.variants.holdout, self.variants.names)
        self.cohorts = CohortWindows()
        self.offer: Callable[[ReplayedRequest], None] = lambda _: None  # takes what a canary may replay
        self._metrics, self._wall = metrics, wall
        self.arms = self._new_arms()
        self._running: set[GuidedRequest] = set()
        self._steps = defaultdict[str, list[ObservedStep]](list)  # by variant, since the guard's last look
        self._looked = 0.0  # monotonic seconds
        self._told_unknown = set[str]()  # drafts that no pool is
        self._guard_now = 0.0  # seconds since the epoch, which never go back
        self._pools: dict[str, str] = {}  # the revisions of draft pools, by name, as targets last told

    # -- requests

    def choose(self, client: str, request: str, tag: str | None, own: int | None, *, own_choice: bool) -> VariantChoice:
        """`own`: nodes of trees that the client wants, None: as configured; `own_choice`: the client set it."""
        assigned = self.variants.assign(client, request, tag, self._wall())
        variant = assigned.variant
        cut = unit(request, "trial") >= self.guard.share(variant.name)
        wanted = [nodes for nodes in (own, variant.max_nodes, 0 if cut else None) if nodes is not None]
        nodes = min(wanted, default=None)
        return VariantChoice(variant, nodes, cut, assigned.pinned or own_choice, named=self.file is not None)

    def begin(
        self, choice: VariantChoice, cohort: Cohort, record: RequestRecord, replay: ReplayedRequest | None
    ) -> GuidedRequest:
        counted = record.facts.mode != "cascade"  # or the small model's steps would count as the large one's
        wanted = replay is not None and choice.max_nodes != 0 and unit(replay.id, "canary") < self.variants.canary
        guided = GuidedRequest(choice, cohort, self._ended, choice.cut, replay if wanted else None, counted=counted)
        self._running.add(guided)
        if counted:
            record.observe_step = partial(self._observe, guided)
        return guided

    def _observe(self, guided: GuidedRequest, verified: Verified, since: float | None) -> None:
        name = guided.choice.variant.name
        self._metrics["pilotfish_variant_steps", name].inc()
        self._metrics["pilotfish_variant_accepted_tokens", name].inc(verified.accepted)
        if since is not None:
            self._metrics["pilotfish_variant_tokens", name].inc(verified.tokens)
            self._metrics["pilotfish_variant_token_seconds", name].inc(since)
        if not (guided.cut or guided.choice.declined):
            self._steps[name].append((verified, since))

    def _ended(self, guided: GuidedRequest, record: RequestRecord) -> None:
        self._running.discard(guided)
        if not guided.counted:
            return
        if record.reason in WHOLE and (replayed := guided.replayed()) is not None:
            self.offer(replayed)
        outcome = self._outcome(guided, record)
        self.arms.add(outcome)
        self.cohorts.add(outcome)
        record.served.scored = lambda score: self.arms.add_score(replace(outcome, score=score))

    def _new_arms(self) -> RolloutArms:
        return RolloutArms(holdout=self.variants.holdout, since=self._wall(), sticky=self.variants.sticky)

    def _outcome(self, guided: GuidedRequest, record: RequestRecord) -> RequestOutcome:
        choice = guided.choice
        failed = record.reason not in WHOLE
        return RequestOutcome(
            ended=self._wall(),
            variant=choice.variant.name,
            cohort=replace(guided.cohort, draft=self._draft_of(guided)),
            cut=guided.cut,
            pinned=choice.pinned,
            failed=failed,
            ttft=record.time_to_first_token,
            itl=record.time_per_output_token,
            latency=record.latency or 0.0,
            tokens=record.generation_tokens,
            steps=record.served.steps,
            trees=record.verify_steps,
            nodes=record.drafted,
            **{name: getattr(record, name) for name in COUNTED},
            valid=None if failed or guided.cohort.output not in CONSTRAINED else record.reason is FinishReason.STOP,
        )

    def _draft_of(self, guided: GuidedRequest) -> str:
        """The assigned draft (revision or pool), even without guesses: results must not decide where requests count."""
        choice, labels = guided.choice, {pool: revision or pool for pool, revision in self._pools.items()}
        if choice.max_nodes == 0:
            return NONE
        if choice.variant.draft or len(set(labels.values())) == 1:
            return choice.variant.draft or next(iter(labels.values()))
        return labels.get(guided.pool, ANY)

    # -- the guard

    def look(self, pools: dict[str, str], now: float) -> None:
        self._pools = pools
        if now - self._looked < PERIOD:
            return
        self._looked = now
        self._tell_unknown_drafts()
        readings = {name: reading_of(steps) for name, steps in self._steps.items()}
        self._steps.clear()
        self._guard_now = max(self._guard_now, self._wall())  # a clock that is set back must not confuse it
        for event in self.guard.observe(readings, self._guard_now):
            logger.warning("variant %s: %s: %s", event.variant, event.kind, event.reason)
            self._metrics["pilotfish_variant_events", event.variant, event.kind].inc()
        self._cut_running()
        for name in self.variants.names:
            self._metrics["pilotfish_variant_share", name].set(self.guard.share(name))
            for kind in EVENTS:  # alerts need them from 0 on
                self._metrics["pilotfish_variant_events", name, kind].inc(0)

    def _tell_unknown_drafts(self) -> None:
        """Once for each: pools may still be loading at the start, so the file is not refused."""
        unknown = self.variants.drafts - set(self._pools.values()) if self._pools else set[str]()
        for draft in sorted(unknown - self._told_unknown):
            message = "rollout: no pool tells the revision %s: its variants run without guesses until one does"
            logger.warning(message, draft)
        self._told_unknown = unknown

    def _cut_running(self) -> None:
        """Stops guessing for running requests of a cut variant; those of a variant that the file dropped go on."""
        cut = {name for name in self.variants.names if self.guard.share(name) == 0.0}
        for guided in self._running:
            if not guided.cut and guided.choice.variant.name in cut:
                guided.cut_short()

    # -- the operator

    def reload(self, known_drafts: Collection[str]) -> None:
        """ParameterError for a file that cannot be used: then the old one stays."""
        assert self.file is not None  # or nobody could ask
        variants = read_file(self.file)
        if unknown := variants.drafts - set(known_drafts):
            known = " or ".join(sorted(filter(None, known_drafts))) or "none: no pool tells one"
            raise ParameterError("variant.draft", min(unknown), f"the revision of a pool that serves: {known}")
        before, self.variants = self.variants, variants
        if (variants.holdout, variants.sticky) != (before.holdout, before.sticky):
            self.arms = self._new_arms()  # comparisons with another holdout say nothing
        self.guard.set_variants(variants.holdout, variants.names)
        logger.info("rollout: %s read again: variants %s", self.file, ", ".join(variants.names))

    def told(self) -> RolloutState:
        now, arms = self._wall(), self.arms
        shares = {variant.name: None if variant.rest else variant.share_at(now) for variant in self.variants.variant}
        return RolloutState(
            **{name: getattr(arms, name) for name in arms.__struct_fields__},
            file=None if self.file is None else str(self.file),
            variants=self.variants.variant,
            shares=shares,
            guard=self.guard.told(),
            events=list(self.guard.events),
        )

    def statistics(self) -> CohortStatistics:
        return self.cohorts.told(self._wall())


def reading_of(steps: Sequence[ObservedStep]) -> GuardReading:
    later = [(verified.tokens, since) for verified, since in steps if since is not None]
    return GuardReading(
        tokens=sum(tokens for tokens, _ in later),
        itl_seconds=sum(since for _, since in later),
        steps=len(steps),
        guessable=sum(verified.sharing > 0 for verified, _ in steps),
        accepted=sum(verified.accepted for verified, _ in steps),
        sharing=sum(verified.sharing for verified, _ in steps),
    )


def read_file(file: Path) -> Variants:
    return read_variants(file_text("rollout", file, "TOML"))
