"""The choice of a level: which leaves a draft expands next, and which prompts it goes on reading."""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np

from pilotfish.core.drafting.draft_sessions import DraftSession, LevelPart, SessionTable
from pilotfish.core.drafting.messages import MAX_NODES
from pilotfish.core.scheduling.calibration import StepCosts
from pilotfish.errors import ParameterError


class LevelCosts(StepCosts):
    """Every knot learns from its own levels alone: if all slow down, unseen widths look cheap and are tried."""

    COMMON = 0.0


class LevelWidth:
    """Chooses the width whose leaves, by the sum of their chances, bring most a second.

    chances  ▇ ▅ ▃ ▂ ▂ ▁ ▁ ▁      A device bound by memory takes as long for one leaf as for all, and takes all.
    seconds  ─────────────/       One bound by arithmetic takes longer for each, and leaves out those that
    width    └── 1 … most         bring less for their time than the others do.
    """

    FLAT = 1.02  # a level of all leaves over one of a single leaf: up to here all are taken, unseen
    REFRESHED = 16  # levels after which the costs are looked at anew

    def __init__(self, most: int) -> None:
        self.most = most
        self._widths = np.arange(1, most + 1)
        self._costs: LevelCosts | None = None
        self._observed = 0
        self._seconds = [1.0] * most  # of a level by its width

    def observe(self, rows: int, seconds: float) -> None:
        if self._costs is None:
            knots = {self.most, *(1 << exponent for exponent in range(self.most.bit_length()))}
            self._costs = LevelCosts(dict.fromkeys(knots, seconds))
        self._costs.observe(rows, seconds)
        self._observed += 1
        if self._observed % self.REFRESHED == 0:
            self._seconds = self._costs.over(self._widths).tolist()

    def best(self, chances: Iterable[float]) -> int:
        """Leaves that pay, at least 1. `chances` likeliest first."""
        if self._seconds[-1] <= self.FLAT * self._seconds[0]:
            return self.most
        best, most_a_second, gain = 1, 0.0, 0.0
        for width, chance in enumerate(islice(chances, self.most), 1):
            gain += chance
            if gain / self._seconds[width - 1] > most_a_second:
                best, most_a_second = width, gain / self._seconds[width - 1]
        return best


#: Rows of prompts that a level takes beside leaves, and without any.
CHUNK, WHOLE_CHUNK = 64, 256
#: Tenants that are remembered as ahead of others; without keys each target that ever connects is one.
MAX_TENANTS = 512


@dataclass(frozen=True)
class LevelShape:
    leaves: int = 32
    children: int = 12

    def __post_init__(self) -> None:
        if not 0 < self.leaves * self.children <= MAX_NODES:
            raise ParameterError("children", self.children, f"1 to {MAX_NODES} nodes a level of {self.leaves} leaves")


#: A leaf that could be expanded: its score, negated; its session's place; its number.
LeafOffer = tuple[float, int, int]


class FairShare:
    """Splits scarce rows in proportion to weights; a tenant that wants less than its share saves nothing up
    (start-time fair queueing: Goyal, Vin and Cheng 1996)."""

    def __init__(self) -> None:
        self._now = 0.0
        self._clocks: dict[str, float] = {}  # rows over weight, of the tenants that are ahead of `_now`

    def split(self, wanted: Mapping[str, int], weights: Mapping[str, float], rows: int) -> dict[str, int]:
        clocks = {tenant: self._clocks.get(tenant, self._now) for tenant, count in wanted.items() if count > 0}
        if sum(wanted.values()) <= rows or len(wanted) == 1:  # no tenant's rows are another's loss
            self._advance(min(clocks.values(), default=self._now))
            return {tenant: min(count, rows) for tenant, count in wanted.items()}
        shares = dict.fromkeys(wanted, 0)
        turns = [(clock, tenant) for tenant, clock in clocks.items()]
        heapq.heapify(turns)
        for _ in range(min(rows, sum(wanted.values()))):
            clock, tenant = heapq.heappop(turns)
            self._now = clock  # the least of all who want rows
            shares[tenant] += 1
            clocks[tenant] = clock + 1 / weights[tenant]
            if shares[tenant] < wanted[tenant]:
                heapq.heappush(turns, (clocks[tenant], tenant))
        self._clocks |= clocks
        self._advance(self._now)
        return shares

    def charge(self, tenant: str, rows: int, weight: float) -> None:
        if rows > 0:
            self._clocks[tenant] = self._clocks.get(tenant, self._now) + rows / weight
        if len(self._clocks) > MAX_TENANTS:
            self._advance(min(self._clocks.values()))

    def _advance(self, now: float) -> None:
        self._now = now
        self._clocks = {tenant: clock for tenant, clock in self._clocks.items() if clock > now}


def _can_grow(session: DraftSession) -> bool:
    rests = session.evicted or session.paused or session.waits
    return not rests and session.max_depth > 0 and len(session.tree) < session.wanted


class LevelChoice:
    def __init__(self, table: SessionTable, shape: LevelShape) -> None:
        self.table = table
        self.shape = shape
        self.width = LevelWidth(shape.leaves)
        self._leaf_share, self._prompt_share = FairShare(), FairShare()

    def next_level(self, now: float) -> list[LevelPart]:
        """Empty if nothing is to be grown. Sessions in its way lose their KV."""
        prompts, growing = list[DraftSession](), list[DraftSession]()
        for session in filter(_can_grow, self.table):
            (prompts if session.num_pending > self.shape.leaves else growing).append(session)
        level = self._leaves(growing)
        level += self._chunks(prompts, CHUNK if level else WHOLE_CHUNK)
        return self._affordable(level, now)

    def _leaves(self, sessions: Sequence[DraftSession]) -> list[LevelPart]:
        """Each tenant's likeliest, up to its share. Sessions whose root has no children come first."""
        wanted, weights = Counter[str](), _weights(sessions)
        merged = heapq.merge(*(self._offers(place, session) for place, session in enumerate(sessions)))
        likeliest = list(islice(merged, self.shape.leaves))
        rows = self.width.best(math.exp(-cost) for cost, *_ in likeliest)
        for session in sessions:
            wanted[session.tenant] += session.num_pending or min(len(session.tree.open), rows)
        shares = self._leaf_share.split(wanted, weights, rows)
        unmet = sum(share > 0 for share in shares.values())
        chosen: list[list[int]] = [[] for _ in sessions]
        offers = chain(likeliest, merged)
        while unmet:
            _, place, leaf = next(offers)
            session = sessions[place]
            if shares[session.tenant] > 0:
                chosen[place].append(leaf)
                shares[session.tenant] -= session.num_pending or 1
                unmet -= shares[session.tenant] <= 0
        for tenant, left in shares.items():
            self._leaf_share.charge(tenant, -left, weights[tenant])  # its last offer was larger than the rest
        return [
            LevelPart.of_pending(session, session.num_pending) if session.num_pending else LevelPart(session, 0, leaves)
            for session, leaves in zip(sessions, chosen, strict=True)
            if leaves
        ]

    def _offers(self, place: int, session: DraftSession) -> Iterator[LeafOffer]:
        """Likeliest first; the root, after tokens without KV, has chance 1."""
        if session.num_pending:
            return iter([(0.0, place, session.tree.root)])
        score = session.tree.root_score
        return ((cost + score, place, leaf) for cost, leaf in session.tree.open)

    def _chunks(self, prompts: Sequence[DraftSession], rows: int) -> list[LevelPart]:
        """Parts of prompts, a tenant's newest sequence first: it has nothing to verify yet."""
        wanted = Counter[str]()
        for session in prompts:
            wanted[session.tenant] += min(session.num_pending, rows)
        shares = self._prompt_share.split(wanted, _weights(prompts), rows)
        level = []
        for session in sorted(prompts, key=lambda s: -s.touched):
            count = min(shares[session.tenant], session.num_pending)
            shares[session.tenant] -= count
            self._leaf_share.charge(session.tenant, count, session.weight)
            if count:
                level.append(LevelPart.of_pending(session, count))
        return level

    def _affordable(self, level: Sequence[LevelPart], now: float) -> list[LevelPart]:
        level = sorted(level, key=lambda part: not part.pending)
        if sum(part.rows for part in level) > self.table.pool.num_available:
            level = self._with_room(level, now)
        left, affordable = self.table.pool.num_available, []
        for part in level:
            if part.rows <= left and not part.session.evicted:
                left -= part.rows
                affordable.append(part)
        return affordable

    def _with_room(self, level: Sequence[LevelPart], now: float) -> Sequence[LevelPart]:
        """Idle sessions give way, then tenants above their share; if none can go on, all prompts but the first."""
        above = self.table.above_share()
        within = [part for part in level if part.session.tenant not in above]
        level, losers = (within, above) if within else (level, set[str]())
        self.table.make_room(sum(part.rows for part in level), {part.session.key for part in level}, losers, now)
        if all(part.rows > self.table.pool.num_available for part in level):
            for session in self.table if level[0].pending else ():
                if session.num_pending > self.shape.leaves and session is not level[0].session:
                    self.table.evict(session)
        return level


def _weights(sessions: Sequence[DraftSession]) -> dict[str, float]:
    return {session.tenant: session.weight for session in sessions}
