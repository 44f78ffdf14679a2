"""A target's copy of the tree that a draft grows for one sequence (core/trees/lookahead.py)."""

from collections import deque
from collections.abc import Sequence
from math import isnan
from operator import lt

from msgspec import Struct

from pilotfish.core.drafting.messages import MAX_NODES, Tree
from pilotfish.core.trees.lookahead import SPARE, LivingTree
from pilotfish.core.trees.tree import ROOT, Forest

LEAST = -1000.0  # pushed scores are raised to this: such nodes are of no use, and sums of many stay finite

Row = tuple[int, int, int, float]  # a node as it was pushed: its id, its parent's, its token, its score


class PushedNode(Struct, frozen=True):
    id: int
    score: float  # of its path


class TreeCopy(LivingTree):
    """Whatever is pushed, it stays a tree below the last committed token, of at most `max_nodes`.

    Pushes with an older base_len are normal: the target committed while they were on their way. Committed tokens stay
    nodes as far back as the last push knew of them, so nodes below the newest are found, and kept:

            pushed below base_len 4:   0 ─── 17 ─┬─ 20        committed since: the token of 17
                                                 └─ 21        kept: 20 and 21, below the root

    A node that is pushed again has the score of the push that knew of more tokens, as trained heads then know better.
    """

    def __init__(self, length: int, vocab_size: int, max_nodes: int) -> None:
        super().__init__()
        self.dropped = 0  # nodes that broke the protocol: foreign tokens, ids that do not rise, too many
        self.breach, self.breach_code = "", ""  # how the last of them did, and which rule it broke
        self.repeated = 0  # nodes that were there already
        self.late = 0  # nodes that were no longer, or never, below the root
        self._first_length = self._length = length
        self._vocab_size = vocab_size
        self._max_nodes = max_nodes
        self._last_id = 0
        self._told = [length]  # of each node: how many tokens the push knew of that its own score is from
        self._ids = [0]  # of each node; 0: it was committed before it was pushed
        self._late_ids = deque[int](maxlen=MAX_NODES)  # since they were taken
        self._by_id: dict[int, int] = {}  # a repeated node's id is one more of the first's
        self._committed = [0]  # from the last token that the last push knew of to the root
        self._lives = {0: True, ROOT: False}  # whether nodes from before the last commit are below the root
        self._newer = 1  # nodes from here on came after the last commit: they are

    def commit(self, tokens: Sequence[int]) -> bool:
        hit = True
        for token in tokens:
            below = self._children.setdefault(self.root, {})
            if token not in below:  # its node may be on its way
                hit = False
                below[token] = self._new(self.root, token, 0.0, self._length)
            self.root = below[token]
            self._committed.append(self.root)
        self._length += len(tokens)
        self._lives, self._newer = {self.root: True, ROOT: False}, len(self._tokens)
        return hit

    def nodes_of(self, trees: Forest, first: int, end: int) -> list[PushedNode]:
        parents, tokens = (values[first:end].tolist() for values in (trees.nodes.parents, trees.nodes.tokens))
        found, pushed = {ROOT: self.root}, list[PushedNode]()
        for place, parent, token in zip(range(first, end), parents, tokens, strict=True):
            node = self._children.get(found.get(parent, ROOT), {}).get(token)
            if node is not None:
                found[place] = node
                pushed.append(PushedNode(self._ids[node], self._scores[node] - self._scores[self.root]))
        return pushed

    def ids_along(self, tokens: Sequence[int]) -> list[int]:
        return [self._ids[node] for node in self.follow(tokens)]

    def take_late(self) -> list[int]:
        """Ids of late nodes; only the last ones if there are too many."""
        late = list(self._late_ids)
        self._late_ids.clear()
        return late

    def _new(self, parent: int, token: int, score: float, told: int, number: int = 0) -> int:
        self._ids.append(number)
        self._own.append(score)
        self._told.append(told)
        self._parents.append(parent)
        self._tokens.append(token)
        self._depths.append(self._depths[parent] + 1)
        self._scores.append(self._scores[parent] + score)
        return len(self._tokens) - 1

    def attach(self, push: Tree) -> None:
        """Add the live nodes of `push`. Nodes that break the protocol are dropped, and counted."""
        if len(self._tokens) > 2 * self._left + SPARE:
            self._clean_up()
        rows = self._lawful(push)
        if not rows:
            return
        del self._committed[: push.base_len - self._first_known]
        self._by_id[0] = self._committed[0]
        last, above, siblings, changed = -1, ROOT, None, (first := len(self._tokens))
        for node, parent, token, score in rows:
            if parent != last:
                last, above = parent, self._by_id.get(parent, ROOT)
                siblings = self._children.setdefault(above, {}) if self._is_below_root(above) else None
            if siblings is None:
                self._add_late(node, above, token)
            elif token in siblings:
                self._by_id[node] = known = siblings[token]
                self.repeated += 1
                if push.base_len > self._told[known]:
                    self._own[known], self._told[known] = score, push.base_len
                    changed = min(changed, known)
            else:
                self._by_id[node] = siblings[token] = self._new(above, token, score, push.base_len, node)
        if changed < first:
            self._rescore(changed)

    def _is_below_root(self, node: int) -> bool:
        """Remembers the answers for all nodes on the way until the next commit."""
        climbed = []
        while node < self._newer and (known := self._lives.get(node)) is None:
            climbed.append(node)
            node = self._parents[node]
        lives = node >= self._newer or bool(known)
        self._lives.update(dict.fromkeys(climbed, lives))
        return lives

    def _add_late(self, node: int, above: int, token: int) -> None:
        """A late node may be a committed token's: nodes below it can still be attached."""
        self.late += 1
        self._late_ids.append(node)
        known = self._children.get(above, {}).get(token)
        if known is not None:
            self._by_id[node] = known

    @property
    def _first_known(self) -> int:
        return self._first_length + self._depths[self._committed[0]]

    def _lawful(self, push: Tree) -> list[Row]:
        first_known = self._first_known
        rising = bool(push.ids) and push.ids[0] > self._last_id and all(map(lt, push.ids, push.ids[1:]))
        self._last_id = push.ids[-1] if rising else self._last_id
        rows: list[Row] = []
        if not rising:
            code, breach = "ids", "ids do not rise"
        elif not first_known <= push.base_len <= self._length:
            code, breach = "base_len", f"base_len {push.base_len} is not {first_known} to {self._length}"
        else:
            rows, code, breach = self._readable(push), "vocabulary", "a token that is not in the vocabulary"
            if len(rows) == len(push.ids):
                code, breach = "room", f"more than {self._max_nodes} nodes"
            rows = rows[: self._room(len(rows))]
        if len(rows) < len(push.ids):
            self.dropped += len(push.ids) - len(rows)
            self.breach_code, self.breach = code, breach
        return rows

    def _readable(self, push: Tree) -> list[Row]:
        rows = zip(push.ids, push.parents, push.tokens, push.scores, strict=True)
        known = min(push.tokens) >= 0 and max(push.tokens) < self._vocab_size
        if known and min(push.scores) >= LEAST and max(push.scores) <= 0.0 and not isnan(sum(push.scores)):
            return list(rows)  # as drafts that keep to the protocol send them
        return [
            (node, parent, token, min(max(score, LEAST), 0.0))
            for node, parent, token, score in rows
            if 0 <= token < self._vocab_size and not isnan(score)
        ]

    def _room(self, wanted: int) -> int:
        if len(self._by_id) + wanted > self._max_nodes:
            self._clean_up()
        return max(self._max_nodes - len(self._by_id), 0)

    def _clean_up(self) -> None:
        kept = sorted({*self._committed, *self._below_root()})
        place = self._renumber(kept)
        self._told, self._ids = ([x[node] for node in kept] for x in (self._told, self._ids))
        self._by_id = {number: place[node] for number, node in self._by_id.items() if node in place and number}
        self._committed = [place[node] for node in self._committed]
        self._lives, self._newer = {self.root: True, ROOT: False}, len(place)
