"""One level: which leaves of which sessions, one forward, their children."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pilotfish.core.lookahead import Ints, Nodes
from pilotfish.core.messages import MAX_NODES, Tree
from pilotfish.core.sharing import FairShare
from pilotfish.core.vocabulary import readable
from pilotfish.draft.children import likely_children
from pilotfish.draft.sessions import Session, SessionTable
from pilotfish.errors import ParameterError
from pilotfish.model.pacer import Pacer, held
from pilotfish.model.runner import NO_NODES, NodeRows, Runner, SequenceRows

#: Rows of prompts that a level takes beside leaves, and without any.
CHUNK, WHOLE_CHUNK = 64, 256
ROOT: Ints = np.array([-1])


@dataclass(frozen=True)
class LevelShape:
    """A level expands up to `leaves` nodes of all sessions together; each gets `children`."""

    leaves: int = 32
    children: int = 12

    def __post_init__(self) -> None:
        if not 0 < self.leaves * self.children <= MAX_NODES:
            raise ParameterError("children", self.children, f"1 to {MAX_NODES} nodes a level of {self.leaves} leaves")


@dataclass(frozen=True)
class Growth:
    """A session's part of a level: its next pending tokens, or some of its leaves."""

    session: Session
    pending: int  # rows of committed tokens
    leaves: Ints  # indices of nodes; the root after the last pending token; none after a part of a prompt

    @property
    def rows(self) -> int:
        return self.pending or len(self.leaves)


@dataclass(frozen=True)
class Grown:
    """What a level added to a session's tree."""

    session: Session
    message: Tree


class Grower:
    """Grows the trees of all sessions by the likeliest leaves, tenants by their weights."""

    def __init__(
        self, runner: Runner, table: SessionTable, shape: LevelShape, vocab_size: int, pacer: Pacer | None = None
    ) -> None:
        """`vocab_size` is the tokenizer's: models may pad theirs. `pacer` holds back each level."""
        self.pacer = pacer
        self.vocab_size = min(vocab_size, runner.model.shape.vocab_size)
        self.runner = runner
        self.table = table
        self.shape = shape
        self._leaf_share, self._prompt_share = FairShare(), FairShare()

    # -- what goes into the next level

    def next_level(self, now: float) -> list[Growth]:
        """Empty where nothing is to be grown."""
        open_sessions = [s for s in self.table if not s.evicted and s.max_depth > 0 and len(s.tree) < s.wanted]
        prompts = [s for s in open_sessions if s.num_pending > self.shape.leaves]
        level = self._leaves([s for s in open_sessions if s.num_pending <= self.shape.leaves])
        level += self._chunks(prompts, CHUNK if level else WHOLE_CHUNK)
        return self._affordable(level, now)

    def _leaves(self, sessions: Sequence[Session]) -> list[Growth]:
        """The likeliest of each tenant's, as many as are its share. Sessions whose root has no children come first."""
        offers = [offer for session in sessions for offer in self._offers(session)]
        offers.sort(key=lambda offer: -offer.score)
        wanted, weights = Counter[str](), _weights(sessions)
        for offer in offers:
            wanted[offer.session.tenant] += offer.rows
        shares = self._leaf_share.split(wanted, weights, self.shape.leaves)
        chosen: dict[int, list[int]] = {}
        for offer in offers:
            if shares[offer.session.tenant] > 0:
                shares[offer.session.tenant] -= offer.rows
                chosen.setdefault(id(offer.session), []).append(offer.leaf)
        for tenant, left in shares.items():
            self._leaf_share.charge(tenant, -left, weights[tenant])  # whose last offer was larger than what was left
        grown = ((session, chosen.get(id(session), [])) for session in sessions)
        return [Growth(session, session.num_pending, np.array(leaves)) for session, leaves in grown if leaves]

    def _offers(self, session: Session) -> list[Offer]:
        if session.num_pending:
            return [Offer(session, -1, 0.0, session.num_pending)]
        leaves = session.tree.leaves(self.shape.leaves, session.max_depth)
        scores = session.tree.nodes.scores[leaves]
        return [Offer(session, leaf, score) for leaf, score in zip(leaves.tolist(), scores.tolist(), strict=True)]

    def _chunks(self, prompts: Sequence[Session], rows: int) -> list[Growth]:
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
                level.append(Growth(session, count, ROOT if count == session.num_pending else ROOT[:0]))
        return level

    def _affordable(self, level: Sequence[Growth], now: float) -> list[Growth]:
        """Those for whom there are slots; what may bring a tree comes before what widens one."""
        level = sorted(level, key=lambda growth: not growth.pending)
        if sum(growth.rows for growth in level) > self.table.pool.num_free:
            level = self._with_room(level, now)
        left, affordable = self.table.pool.num_free, []
        for growth in level:
            if growth.rows <= left:
                left -= growth.rows
                affordable.append(growth)
        return affordable

    def _with_room(self, level: Sequence[Growth], now: float) -> Sequence[Growth]:
        """The level after others gave way: idle sessions, and tenants that hold more than their share to those that
        do not. Where still none can go on, prompts that were begun give way to the first."""
        above = self.table.above_share()
        within = [growth for growth in level if growth.session.tenant not in above]
        level, losers = (within, above) if within else (level, set[str]())
        self.table.make_room(sum(g.rows for g in level), {g.session.key for g in level}, losers, now)
        if all(growth.rows > self.table.pool.num_free for growth in level):
            self._give_up_prompts(level[0])
        return level

    def _give_up_prompts(self, growth: Growth) -> None:
        """Those begun, beside the one that `growth` goes on with: each may hold what the other lacks."""
        for session in self.table:
            if session.num_pending > self.shape.leaves and session is not growth.session and growth.pending:
                self.table.evict(session)

    # -- the level

    def grow(self, level: Sequence[Growth]) -> list[Grown]:
        """One forward; what it added to each tree."""
        with held(self.pacer, sum(growth.rows for growth in level)):
            return self._grown(level)

    def _grown(self, level: Sequence[Growth]) -> list[Grown]:
        logits = self.runner.forward([self._rows(growth) for growth in level])[:, : self.vocab_size]
        sampling = [growth.session.row_sampling(leaf) for growth in level for leaf in growth.leaves.tolist()]
        if not sampling:
            return []
        children = likely_children(logits, sampling, self.shape.children)
        grown, row = [], 0
        for growth in level:
            rows = slice(row, row + len(growth.leaves))
            row = rows.stop
            if len(growth.leaves):
                parents = np.repeat(growth.leaves, children.tokens.shape[1])
                tokens, tree = children.tokens[rows].ravel(), growth.session.tree
                log_chances = children.log_chances[rows].ravel()
                log_chances[growth.session.unshared.mask(tokens)] = -np.inf
                added = tree.add(parents, tokens, log_chances)
                grown.append(Grown(growth.session, _pushed(growth.session, added)))
        return grown

    def _rows(self, growth: Growth) -> SequenceRows:
        session = growth.session
        slots = np.array(self.table.pool.allocate(growth.rows), np.int32)
        if growth.pending:
            start = len(session.slots)
            session.slots = np.append(session.slots, slots)
            tokens = readable(session.tokens[start : start + growth.pending], self.runner.model.shape.vocab_size)
            kept = [growth.pending - 1] if len(growth.leaves) else []
            return SequenceRows(start, tokens, session.slots, NO_NODES, kept)
        nodes = session.tree.nodes
        session.tree.expand(growth.leaves, slots)
        paths = session.tree.paths(growth.leaves)
        rows = NodeRows(nodes.tokens[growth.leaves], nodes.depths[growth.leaves], paths)
        return SequenceRows(len(session.slots), [], session.slots, rows, kept=())


@dataclass(frozen=True)
class Offer:
    """A leaf that could be expanded; -1: the root, after the tokens that lack KV."""

    session: Session
    leaf: int
    score: float
    rows: int = 1


def _weights(sessions: Sequence[Session]) -> dict[str, float]:
    return {session.tenant: session.weight for session in sessions}


def _pushed(session: Session, added: Nodes) -> Tree:
    """The message that tells of `added`, the newest nodes of the session's tree."""
    nodes = session.tree.nodes
    parents, above = np.append(nodes.ids, 0)[added.parents], np.append(nodes.scores, 0.0)[added.parents]
    session.pushes += 1
    return Tree(
        session.key.session,
        session.generation,
        session.pushes - 1,
        len(session.tokens),
        added.ids.tolist(),
        parents.tolist(),
        added.tokens.tolist(),
        np.minimum(added.scores - above, 0.0).tolist(),
    )
