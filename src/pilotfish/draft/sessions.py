"""The sequences that a draft worker grows trees for, and its KV of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from pilotfish.core.logit_rules import LogitRules
from pilotfish.core.lookahead import NO_SLOT, Lookahead, Rerooted
from pilotfish.core.messages import MAX_NODES, Commit, Open, Peer, Sampling
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.core.slots import SlotPool
from pilotfish.core.vocabulary import Unshared
from pilotfish.model.sampling import RowSampling

#: Seconds without a commit after which a sequence's KV may go to another.
IDLE = 0.5
#: Seconds without one after which a sequence is forgotten; its next commit has it opened anew.
FORGOTTEN = 20.0
MAX_SESSIONS = 4096


@dataclass(frozen=True)
class Key:
    """A session: its number among those of a target's incarnation."""

    target: Peer
    session: int


@dataclass
class Session:
    """A sequence as the draft knows it.

    tokens   [ prompt ....... output ...... ]
    slots    [ ===================== ]        those with KV here; while any is missing the tree is empty
    """

    key: Key
    generation: int
    tenant: str
    weight: float
    tokens: list[int]
    max_length: int
    seed: int
    params: SamplingParams
    rules: LogitRules | None
    wanted: int
    touched: float  # when it was last opened or committed to
    read: float = 0.0  # when a level last read tokens of it
    unshared: Unshared = field(default_factory=Unshared)
    slots: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    tree: Lookahead = field(default_factory=Lookahead)
    evicted: bool = False  # rests until its next commit
    pushes: int = 0

    @property
    def num_pending(self) -> int:
        """Committed tokens without KV here."""
        return len(self.tokens) - len(self.slots)

    @property
    def max_depth(self) -> int:
        """Of a node that could be committed."""
        return self.max_length - len(self.tokens) - 1

    @property
    def num_slots(self) -> int:
        """Held here, by tokens and nodes."""
        return len(self.slots) + int(np.count_nonzero(self.tree.nodes.slots != NO_SLOT))

    def row_sampling(self, leaf: int) -> RowSampling:
        """How the target draws the token after the node at index `leaf`, or after the root (-1)."""
        if self.rules is None:
            depth = 0 if leaf < 0 else int(self.tree.nodes.depths[leaf])
            return RowSampling(self.params, self.seed, len(self.tokens) + depth)
        path = self.tree.path_tokens(leaf)
        return RowSampling(self.params, self.seed, len(self.tokens) + len(path), self.rules.edits(path))


def session_of(key: Key, message: Open, tenant: str, weight: float, max_length: int, now: float) -> Session:
    """A session of `max_length` tokens at most; ParameterError for sampling parameters that no target takes."""
    params, rules = _mirrored(message.sampling, message.tokens, message.prompt_tokens)
    return Session(
        key,
        message.generation,
        tenant,
        weight,
        list(message.tokens),
        min(message.max_length, max_length),
        message.seed,
        params,
        rules,
        min(message.wanted, MAX_NODES),
        touched=now,
    )


def _mirrored(
    sampling: Sampling, tokens: Sequence[int], prompt_tokens: int
) -> tuple[SamplingParams, LogitRules | None]:
    params = SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=None if sampling.allowed_token_ids is None else tuple(sampling.allowed_token_ids),
        bad_token_ids=tuple(sampling.bad_token_ids),
        min_tokens=sampling.min_tokens,
        max_tokens=max(sampling.min_tokens, 1),
    )
    rules = LogitRules.of(params, tokens[:prompt_tokens], frozenset(sampling.stop_ids), sampling.bad_sequences)
    if rules is not None:
        rules.extend(tokens[prompt_tokens:])
    return params, rules


class SessionTable:
    """All sessions over one pool of KV slots; the only place that changes them."""

    def __init__(self, pool: SlotPool) -> None:
        self.pool = pool
        self._sessions: dict[Key, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def get(self, key: Key) -> Session | None:
        return self._sessions.get(key)

    def of(self, target: Peer) -> list[Session]:
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

    def open(self, session: Session) -> None:
        """Add it. One that it replaces leaves it the KV of the tokens that both have."""
        before = self._sessions.pop(session.key, None)
        if before is not None:
            pairs = zip(before.tokens[: len(before.slots)], session.tokens, strict=False)
            common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            common = min(common, len(session.tokens) - 1)  # the last is computed again, for its logits
            session.slots = before.slots[:common]
            self.pool.release([*before.slots[common:].tolist(), *before.tree.drop()])
        self._sessions[session.key] = session

    def commit(self, session: Session, message: Commit, now: float) -> Rerooted:
        """Add the target's tokens and re-root: the accepted nodes' slots join the session's, those of dead nodes are
        free. Nothing is copied."""
        caught_up = session.num_pending == 0
        rerooted = session.tree.commit(message.tokens)
        kept = rerooted.path_slots if caught_up else []
        session.slots = np.append(session.slots, np.array(kept, np.int32))
        self.pool.release(rerooted.freed)
        session.tokens.extend(message.tokens)
        if session.rules is not None:
            session.rules.extend(message.tokens)
        session.wanted, session.touched, session.evicted = min(message.wanted, MAX_NODES), now, False
        return rerooted

    def close(self, session: Session) -> None:
        """Forget it; what it held is free."""
        self._free(session)
        del self._sessions[session.key]

    def evict(self, session: Session) -> None:
        """Take its KV; it rests until its next commit."""
        self._free(session)
        session.evicted = True

    def _free(self, session: Session) -> None:
        self.pool.release([*session.slots.tolist(), *session.tree.drop()])
        session.slots = np.zeros(0, np.int32)

    def above_share(self) -> set[str]:
        """Tenants that hold more of the slots than their weight among all tenants here gives them."""
        held, weights = Counter[str](), dict[str, float]()
        for session in self:
            held[session.tenant] += session.num_slots
            weights[session.tenant] = session.weight
        slots_by_weight = self.pool.capacity / sum(weights.values()) if weights else 0.0
        return {tenant for tenant, slots in held.items() if slots > slots_by_weight * weights[tenant]}

    def make_room(self, count: int, kept: Collection[Key], tenants: Collection[str], now: float) -> None:
        """Have `count` slots free, if they can be had: idle sessions and those of `tenants` lose theirs, the ones
        idle longest first, but none of `kept`."""
        losers = [s for s in self if (now - s.touched > IDLE or s.tenant in tenants) and s.key not in kept]
        for session in sorted((s for s in losers if len(s.slots)), key=lambda s: s.touched):
            if self.pool.num_free >= count:
                return
            self.evict(session)

    def forget_idle(self, now: float) -> None:
        """Close what was not heard of for long. A target keeps its commits back while a long prompt is read: the time
        until then does not count."""
        for session in [s for s in self if now - max(s.touched, s.read) > FORGOTTEN]:
            self.close(session)

    def check(self) -> None:
        """EngineError unless every slot is free or belongs to exactly one session."""
        expanded = [slot for s in self for slot in s.tree.nodes.slots.tolist() if slot >= 0]
        self.pool.check([*(slot for s in self for slot in s.slots.tolist()), *expanded])
