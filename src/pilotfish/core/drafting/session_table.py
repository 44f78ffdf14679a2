"""The table of a draft's sessions, and the KV of what they read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from pilotfish.core.cache.prefix_cache import PrefixCache
from pilotfish.core.cache.slots import NO_SLOTS, SlotPool, Slots
from pilotfish.core.drafting.draft_sessions import DraftSession, LevelPart, SessionKey
from pilotfish.core.drafting.mapped_text import MappedText
from pilotfish.core.drafting.messages import Peer
from pilotfish.core.trees.child_calibration import TenantCalibrations
from pilotfish.core.trees.lookahead import RerootResult
from pilotfish.errors import EngineError

#: Seconds without a commit after which a sequence's KV may go to another.
IDLE = 0.5
#: Seconds without one after which a sequence is forgotten; its next commit has it opened anew.
FORGOTTEN = 20.0
MAX_SESSIONS = 4096


class SessionTable:
    """All sessions over one pool of KV slots, and the KV that sessions have left; the only place that allocates and
    frees slots.

    Sessions of one tenant and salt share the KV of tokens that they begin with. What a session was opened with can be
    found once it is computed; the rest of its committed tokens when it loses its slots; nodes never.
    """

    def __init__(self, pool: SlotPool, cache: PrefixCache | None = None) -> None:
        """`cache`, of this pool, keeps the KV that sessions leave."""
        self.pool = pool
        self.cache = cache
        self.calibrations = TenantCalibrations()
        self.rewritten = 0  # commits after which what a mapped session reads was not as before
        self._sessions: dict[SessionKey, DraftSession] = {}
        self._evicted: list[DraftSession] = []  # since `take_evicted`

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[DraftSession]:
        return iter(self._sessions.values())

    def get(self, key: SessionKey) -> DraftSession | None:
        return self._sessions.get(key)

    def of(self, target: Peer) -> list[DraftSession]:
        return [session for session in self if session.key.target == target]

    def admit(self, tenant: str) -> bool:
        """Whether one more session of `tenant` may be opened. When there are too many, the tenant with the most loses
        the one idle longest to a tenant with fewer."""
        if len(self) < MAX_SESSIONS:
            return True
        counts = Counter(session.tenant for session in self)
        (largest, most), *_ = counts.most_common(1)
        if most <= counts[tenant] + 1:
            return False
        self.close(min((s for s in self if s.tenant == largest), key=lambda s: s.touched))
        return True

    def open(self, session: DraftSession) -> int:
        """Add it, with the KV that is known of its tokens: of how many. One that it replaces leaves its KV before."""
        before = self._sessions.pop(session.key, None)
        if before is not None:
            self._free(before)
        self._sessions[session.key] = session
        return self._find(session)

    def commit(self, session: DraftSession, tokens: Sequence[int]) -> RerootResult:
        """Add the target's tokens and re-root: the accepted nodes' slots join the session's, those of dead nodes are
        free. Nothing is copied. A trained head's rows of accepted nodes were of guessed features: they are computed
        again, from the target's own, and then the nodes below, likeliest first. What was guessed there stays until
        then, unless it takes up most of what the tree may have: a tree that is soon grown is better grown anew."""
        self.calibrations.of(session.tenant).observe(session.greedy, session.tree.outcomes(tokens))
        caught_up = session.num_missing == 0
        rerooted = session.tree.commit(tokens)
        if session.features is not None:
            self.pool.release(rerooted.path_slots)
            if 2 * len(session.tree) > session.wanted:
                self.pool.release(session.tree.drop())
        elif caught_up and rerooted.path_slots:
            session.slots = np.concatenate((session.slots, np.array(rerooted.path_slots, np.int32)))
        self.pool.release(rerooted.freed)
        session.tokens.extend(tokens)
        if session.text is not None:
            self._read(session, session.text, tokens, rerooted)
        if session.rules is not None:
            session.rules.extend(tokens)
        if session.grammar is not None:
            session.grammar.extend(tokens)
        return rerooted

    def _read(self, session: DraftSession, text: MappedText, tokens: Sequence[int], rerooted: RerootResult) -> None:
        """A mapped session reads the tokens as its vocabulary writes them: KV of what that changes goes."""
        text.follow(tokens[: rerooted.accepted])
        if not rerooted.hit:
            before = len(text.inputs)
            kept = text.read(tokens[rerooted.accepted :])
            self.rewritten += kept < before
            self._keep(session, kept)

    def drop_tree(self, session: DraftSession) -> None:
        """Free the slots of its nodes. The last token is computed again, for its logits."""
        self.pool.release(session.tree.drop())
        self._keep(session, len(session.slots))

    def _keep(self, session: DraftSession, count: int) -> None:
        kept = min(count, len(session.slots), len(session.inputs) - 1)
        self.pool.release(session.slots[kept:].tolist())
        self._set_slots(session, session.slots[:kept])

    def close(self, session: DraftSession) -> None:
        """Forget it; its slots are idle, or free."""
        self._free(session)
        del self._sessions[session.key]

    def evict(self, session: DraftSession) -> None:
        """Take its KV; it rests until it is woken."""
        self._free(session)
        session.evicted = True
        self._evicted.append(session)

    def take_evicted(self) -> list[DraftSession]:
        evicted, self._evicted = self._evicted, []
        return [session for session in evicted if session.evicted and self.get(session.key) is session]

    def wake(self, session: DraftSession) -> int:
        """A session that was evicted goes on, with the KV that is still known of its tokens: of how many."""
        session.evicted = False
        return self._find(session)

    def _find(self, session: DraftSession) -> int:
        """Give a session without KV what is known; not of the last token, which is computed for its logits."""
        if self.cache is not None:
            self._set_slots(session, self.cache.match(session.root, session.inputs[:-1]))
            self.pool.share(session.slots)
        return len(session.slots)

    def _set_slots(self, session: DraftSession, slots: Slots) -> None:
        """It has these now: the features that the next row needs are to come, again if they came before."""
        session.slots = slots
        if session.features is not None:
            session.features.restart(max(len(slots) - 1, 0))

    def _remember(self, session: DraftSession, count: int) -> None:
        """Let others find the KV of its first `count` tokens; where it was known already, have that instead. What was
        computed without features that were lost is for itself alone."""
        if self.cache is not None:
            count = count if session.features is None else session.features.num_whole(count)
            own = self.cache.insert(session.root, session.inputs[:count], session.slots[:count])
            session.slots = np.concatenate((own, session.slots[count:]))

    def _free(self, session: DraftSession) -> None:
        self._remember(session, len(session.slots))
        self.pool.release([*session.slots.tolist(), *session.tree.drop()])
        self._set_slots(session, NO_SLOTS)

    def allocate(self, level: Sequence[LevelPart]) -> None:
        counts = [part.new_rows for part in level]
        slots = self._take(sum(counts))
        numbers, used = slots.tolist(), 0
        for part, count in zip(level, counts, strict=True):
            first, used = used, used + count
            if part.pending:
                part.session.slots = np.concatenate((part.session.slots, slots[first:used]))
            else:
                part.session.tree.expand(part.leaves, numbers[first:used])

    def _take(self, count: int) -> Slots:
        return self.pool.allocate(count) if self.cache is None else self.cache.allocate(count)

    def computed(self, level: Sequence[LevelPart]) -> None:
        """The forward over `level` has run: others may find what its sessions were opened with."""
        for part in level:
            session = part.session
            if session.features is not None:
                session.features.forget(len(session.slots))
            if len(session.slots) - part.pending < session.opened <= len(session.slots):
                self._remember(session, session.opened)

    def above_share(self) -> set[str]:
        """Tenants that hold more of the slots than their weight among all tenants here gives them."""
        held, weights = defaultdict[str, set[int]](set), dict[str, float]()
        for session in self:
            held[session.tenant].update(session.slots.tolist(), session.tree.slots)
            weights[session.tenant] = session.weight
        slots_by_weight = self.pool.capacity / sum(weights.values()) if weights else 0.0
        return {tenant for tenant, slots in held.items() if len(slots) > slots_by_weight * weights[tenant]}

    def make_room(self, count: int, kept: Collection[SessionKey], tenants: Collection[str], now: float) -> None:
        """Have `count` slots available, if they can be had: idle sessions and those of `tenants` lose theirs, the ones
        idle longest first, but none of `kept`."""
        losers = [s for s in self if (s.paused or now - s.touched > IDLE or s.tenant in tenants) and s.key not in kept]
        for session in sorted((s for s in losers if len(s.slots)), key=lambda s: (not s.paused, s.touched)):
            if self.pool.num_available >= count:
                return
            self.evict(session)

    def forget_idle(self, now: float) -> None:
        """Close sessions that were not heard of for long. A target keeps its commits back while a long prompt is read:
        the time until then does not count."""
        for session in [s for s in self if now - max(s.touched, s.read) > FORGOTTEN]:
            self.close(session)

    def check(self) -> None:
        """EngineError unless every slot is free, or in the cache, or counts the sessions that it belongs to."""
        if any(session.evicted and (len(session.slots) or session.tree.slots) for session in self):
            raise EngineError("draft sessions: one that rests without KV holds slots")
        expanded = [slot for s in self for slot in s.tree.slots]
        kept = () if self.cache is None else self.cache.slots
        self.pool.check([*(slot for s in self for slot in s.slots.tolist()), *expanded], kept)
        if self.cache is not None:
            self.cache.check()
