"""Sequences that a draft grows trees for, their parts of a level, and the KV of their tokens."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from pilotfish.core.cache.prefix_cache import PrefixCache
from pilotfish.core.cache.slots import NO_SLOTS, SlotPool, Slots
from pilotfish.core.drafting.messages import MAX_NODES, Open
from pilotfish.core.drafting.vocabulary_map import MappedText, MappedVocabulary, Unshared
from pilotfish.core.features.features import FeatureLog
from pilotfish.core.peers.fields import Peer
from pilotfish.core.sampling.constraint import FollowedGrammar, GrammarSource, GrammarState, no_grammars
from pilotfish.core.sampling.logit_rules import LogitEdits
from pilotfish.core.scheduling.executor import ANY_DEPTH
from pilotfish.core.trees.child_calibration import TenantCalibrations
from pilotfish.core.trees.lookahead import Lookahead, NewNodes, RerootResult
from pilotfish.core.trees.tree import Floats, Ints
from pilotfish.errors import EngineError, InputError

MOST_TO_ONE = 4  # tokens of a target with another vocabulary for each that its draft can read, at most


@dataclass(frozen=True)
class SessionKey:
    target: Peer
    number: int


@dataclass(frozen=True)
class DraftModel:
    longest: int  # inputs of a session
    grammars: GrammarSource = no_grammars
    feature_width: int = 0  # of a trained head, else 0

    def most_tokens(self, vocabulary: MappedVocabulary | None) -> int:
        """Of a session; `vocabulary` is its target's, None: the draft's own."""
        return self.longest * (1 if vocabulary is None else MOST_TO_ONE)


class DraftSession:
    """A sequence as the draft knows it.

        tokens   [ prompt ....... output ...... ]
        inputs   [ prompt ....... output ...... ]     the same, or as a draft with another vocabulary reads them
        slots    [ ===================== ]            those with KV here; while any is missing the tree does not grow

    Lengths that targets know, and positions of the noise, are those of the tokens.
    """

    def __init__(
        self,
        key: SessionKey,
        message: Open,
        tenant: str,
        weight: float,
        now: float,
        model: DraftModel,
        unshared: Unshared,
        vocabulary: MappedVocabulary | None = None,
    ) -> None:
        """`vocabulary` is the target's; None: it is the draft's. ParameterError for sampling parameters that no target
        takes."""
        output, constraint = message.tokens[message.prompt_tokens :], message.constraint
        grammars = model.grammars if vocabulary is None else vocabulary.grammars
        self.key, self.generation = key, message.generation
        self.tenant, self.weight = tenant, weight
        self.salt = message.salt  # a digest
        self.tokens = list(message.tokens)
        self.vocabulary, self.unshared = vocabulary, unshared
        self.text = None if vocabulary is None else MappedText(vocabulary.map, message.tokens)
        self.opened = len(self.inputs)  # at the Open
        self.max_length = min(message.max_length, model.most_tokens(vocabulary))  # in tokens
        self.longest = model.longest  # in inputs
        self.seed = message.seed
        self.params = message.sampling.params()
        self.rules = message.sampling.rules(self.params, message.tokens, message.prompt_tokens)
        self.grammar = None if constraint is None else FollowedGrammar(grammars(constraint), output)
        self.wanted = min(message.wanted, MAX_NODES)  # nodes after which its tree stops growing
        self.touched = now  # when it was last opened or committed to
        self.read = 0.0  # when a level last read tokens of it
        self.slots: Slots = NO_SLOTS
        self.tree = Lookahead()
        self.evicted = False  # its KV went to another; rests until its next commit or, where it is parked, Resume
        self.parked: float | None = None  # when its target was told Pause, and to keep its commits back
        self.paused = False  # its target has it rest
        self.pushes = 0
        self.features = FeatureLog(model.feature_width) if model.feature_width else None  # of a trained head's

    @property
    def inputs(self) -> list[int]:
        return self.tokens if self.text is None else self.text.inputs

    @property
    def num_missing(self) -> int:
        return len(self.inputs) - len(self.slots)

    @property
    def num_pending(self) -> int:
        """Missing inputs whose rows can be computed now; others wait for features. The first goes with the second."""
        if self.features is None:
            return self.num_missing
        known = min(self.features.reach, len(self.tokens) - 1)
        return max(known + 1 - len(self.slots), 0) if known else 0

    @property
    def waits(self) -> bool:
        return self.num_missing > 0 and self.num_pending == 0

    @property
    def max_depth(self) -> int:
        return min(self.max_length - len(self.tokens), self.longest - len(self.inputs)) - 1

    def input_at(self, leaf: int) -> int:
        token = self.tree.token(leaf)
        return token if self.text is None else self.text.map.counterpart(token)

    @property
    def cache_salt(self) -> str:
        return f"{'' if self.salt is None else self.salt.hex()} {self.tenant}"

    def length_at(self, leaf: int) -> int:
        return len(self.tokens) + self.tree.depth(leaf)

    def edits_at(self, leaf: int) -> LogitEdits | None:
        return None if self.rules is None else self.rules.edits(self.tree.path_tokens(leaf))

    def grammar_state(self) -> GrammarState | None:
        return None if self.grammar is None else self.grammar.state()


@dataclass(frozen=True)
class LevelPart:
    session: DraftSession
    pending: int  # rows of committed tokens
    leaves: Sequence[int]  # nodes; the root after the last pending token; none after a part of a prompt

    @classmethod
    def of_pending(cls, session: DraftSession, count: int) -> "LevelPart":
        return cls(session, count, [session.tree.root] if count == session.num_missing else [])

    @property
    def rows(self) -> int:
        return self.pending or len(self.leaves)


def add_children(
    level: Sequence[LevelPart],
    tokens: Ints,  # [leaves, children], likeliest first
    log_chances: Floats,  # likewise
    calibrations: TenantCalibrations,
    deepest: int = ANY_DEPTH,
) -> list[NewNodes]:
    """The nodes kept of each part, in order. Nodes at `deepest` are never expanded."""
    depths = np.array([part.session.tree.depth(leaf) + 1 for part in level for leaf in part.leaves], np.int64)
    greedy = np.array([part.session.params.greedy for part in level for _ in part.leaves], np.bool_)
    tenants = np.array([part.session.tenant for part in level for _ in part.leaves], np.str_)
    chances = np.minimum(calibrations.calibrated(tenants, greedy, depths, log_chances), 0.0)
    above = np.array([part.session.tree.score(leaf) for part in level for leaf in part.leaves])
    kept = above[:, None] + chances > Lookahead.FLOOR
    spans, largest = list(pairwise(accumulate((len(part.leaves) for part in level), initial=0))), tokens.max(initial=0)
    for part, (row, end) in zip(level, spans, strict=True):
        if len(part.session.unshared.ids) or largest >= part.session.unshared.first:
            kept[row:end] &= ~part.session.unshared.mask(tokens[row:end])
    counts, tokens_kept, chances_kept = kept.sum(axis=1).tolist(), tokens[kept].tolist(), chances[kept].tolist()
    added, first = [], 0
    for part, (row, end) in zip(level, spans, strict=True):
        own = slice(first, first := first + sum(counts[row:end]))
        session, nodes = part.session, (tokens_kept[own], chances_kept[own])
        added.append(session.tree.add(part.leaves, counts[row:end], *nodes, min(session.max_depth, deepest)))
    return added


IDLE = 0.5  # seconds without a commit after which a sequence's KV may go to another
#: Seconds without a commit after which a sequence is forgotten; its next commit opens it anew.
FORGOTTEN = 20.0
MAX_SESSIONS = 4096


class SessionTable:
    """All sessions over one pool of KV slots, and the KV that sessions left; the only place that allocates and frees
    slots. Sessions of one tenant and salt share the KV of their common prefix: of the opened tokens once computed,
    of later committed tokens when the session loses its slots; of nodes never."""

    def __init__(self, pool: SlotPool, cache: PrefixCache | None = None) -> None:
        self.pool = pool
        self.cache = PrefixCache(pool, keeps=False) if cache is None else cache
        self.calibrations = TenantCalibrations()
        self.rewritten = 0  # commits that changed earlier inputs of a mapped session
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

    def admit(self, tenant: str) -> None:
        """Make room: the tenant with the most sessions loses the one idle longest to a tenant with fewer. InputError
        for others."""
        if len(self) < MAX_SESSIONS:
            return
        counts = Counter(session.tenant for session in self)
        (largest, most), *_ = counts.most_common(1)
        if most <= counts[tenant] + 1:
            raise InputError(f"sessions: there are {MAX_SESSIONS} already")
        self.close(min((s for s in self if s.tenant == largest), key=lambda s: s.touched))

    def open(self, session: DraftSession) -> int:
        """The number of tokens whose KV is known. A session that it replaces leaves its KV before."""
        before = self._sessions.pop(session.key, None)
        if before is not None:
            self._free(before)
        self._sessions[session.key] = session
        return self._find(session)

    def commit(self, session: DraftSession, tokens: Sequence[int]) -> RerootResult:
        """Accepted nodes' slots join the session's, dead nodes' are freed. A trained head computed nodes from guessed
        features: they are computed again, or, where most of the tree is guesses, it is grown anew."""
        self.calibrations.of(session.tenant).observe(session.params.greedy, session.tree.outcomes(tokens))
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
        text.follow(tokens[: rerooted.accepted])
        if not rerooted.hit:
            before = len(text.inputs)
            kept = text.read(tokens[rerooted.accepted :])
            self.rewritten += kept < before
            self._keep(session, kept)

    def drop_tree(self, session: DraftSession) -> None:
        """Free its nodes' slots. The last token is computed again, for its logits."""
        self.pool.release(session.tree.drop())
        self._keep(session, len(session.slots))

    def _keep(self, session: DraftSession, count: int) -> None:
        kept = min(count, len(session.slots), len(session.inputs) - 1)
        self.pool.release(session.slots[kept:].tolist())
        self._set_slots(session, session.slots[:kept])

    def close(self, session: DraftSession) -> None:
        self._free(session)
        del self._sessions[session.key]

    def evict(self, session: DraftSession) -> None:
        self._free(session)
        session.evicted = True
        self._evicted.append(session)

    def take_evicted(self) -> list[DraftSession]:
        evicted, self._evicted = self._evicted, []
        return [session for session in evicted if session.evicted and self.get(session.key) is session]

    def wake(self, session: DraftSession) -> int:
        session.evicted = False
        return self._find(session)

    def _find(self, session: DraftSession) -> int:
        """Give a session without KV its known KV; the last token is computed, for its logits."""
        self._set_slots(session, self.cache.match(session.cache_salt, session.inputs[:-1]))
        self.pool.share(session.slots)
        return len(session.slots)

    def _set_slots(self, session: DraftSession, slots: Slots) -> None:
        """The features that the next row needs are to come, again if they came before."""
        session.slots = slots
        if session.features is not None:
            session.features.restart(max(len(slots) - 1, 0))

    def _remember(self, session: DraftSession, count: int) -> None:
        """Let others find KV of its first `count` tokens, but for rows without features; known KV replaces its own."""
        count = count if session.features is None else session.features.num_whole(count)
        own = self.cache.insert(session.cache_salt, session.inputs[:count], session.slots[:count])
        session.slots = np.concatenate((own, session.slots[count:]))

    def _free(self, session: DraftSession) -> None:
        self._remember(session, len(session.slots))
        self.pool.release([*session.slots.tolist(), *session.tree.drop()])
        self._set_slots(session, NO_SLOTS)

    def allocate(self, level: Sequence[LevelPart]) -> None:
        counts = [part.pending or part.session.tree.lacking(part.leaves) for part in level]
        slots = self.cache.allocate(sum(counts))
        numbers, used = slots.tolist(), 0
        for part, count in zip(level, counts, strict=True):
            first, used = used, used + count
            if part.pending:
                part.session.slots = np.concatenate((part.session.slots, slots[first:used]))
            else:
                part.session.tree.expand(part.leaves, numbers[first:used])

    def computed(self, level: Sequence[LevelPart]) -> None:
        for part in level:
            session = part.session
            if session.features is not None:
                session.features.forget(len(session.slots))
            if len(session.slots) - part.pending < session.opened <= len(session.slots):
                self._remember(session, session.opened)

    def above_share(self) -> set[str]:
        held, weights = defaultdict[str, set[int]](set), dict[str, float]()
        for session in self:
            held[session.tenant].update(session.slots.tolist(), session.tree.slots)
            weights[session.tenant] = session.weight
        slots_by_weight = self.pool.capacity / sum(weights.values()) if weights else 0.0
        return {tenant for tenant, slots in held.items() if len(slots) > slots_by_weight * weights[tenant]}

    def make_room(self, count: int, kept: Collection[SessionKey], tenants: Collection[str], now: float) -> None:
        """Free `count` slots if possible: idle sessions and those of `tenants`, but none of `kept`, lose theirs."""
        losers = [s for s in self if (s.paused or now - s.touched > IDLE or s.tenant in tenants) and s.key not in kept]
        for session in sorted((s for s in losers if len(s.slots)), key=lambda s: (not s.paused, s.touched)):
            if self.pool.num_available >= count:
                return
            self.evict(session)

    def forget_idle(self, now: float) -> None:
        """The time until a long prompt is read does not count: a target then keeps its commits back."""
        for session in [s for s in self if now - max(s.touched, s.read) > FORGOTTEN]:
            self.close(session)

    def check(self) -> None:
        """EngineError unless every slot is free, or in the cache, or counts the sessions that own it."""
        if any(session.evicted and (len(session.slots) or session.tree.slots) for session in self):
            raise EngineError("draft sessions: one that rests without KV holds slots")
        expanded = [slot for s in self for slot in s.tree.slots]
        self.pool.check([*(slot for s in self for slot in s.slots.tolist()), *expanded], self.cache.slots)
        self.cache.check()
