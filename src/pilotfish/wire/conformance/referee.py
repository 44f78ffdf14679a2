"""The rules of a drafter's messages, and the record of a session: every message that comes is held against them."""

import math
from collections import Counter
from dataclasses import dataclass, field

from pilotfish.config.hardware.tables import read_table
from pilotfish.core.drafting.messages import Tree

#: Rules that hold at any moment, and the sentence of docs/draft-protocol.md that each is from.
RULES = read_table(__file__, "rules", dict[str, str])


@dataclass(frozen=True)
class Node:
    parent: int  # 0: the root of its Tree
    token: int
    position: int  # in the sequence, from 0


@dataclass
class PlayedSession:
    number: int
    generation: int
    tokens: list[int]
    wanted: int
    opened_at: float
    told: int  # tokens that the draft was told of
    closed_at: float | None = None
    pushes: int = 0
    base_len: int = 0  # of the last Tree
    last_id: int = 0
    nodes: dict[int, Node] = field(default_factory=dict)
    trees: list[Tree] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)  # of `trees`
    resyncs: list[str] = field(default_factory=list)  # reasons
    refusals: list[str] = field(default_factory=list)
    lossy: bool = False  # frames of it are lost on purpose: numbers may have gaps

    def reopen(self, now: float) -> None:
        self.generation, self.told, self.opened_at, self.closed_at = self.generation + 1, len(self.tokens), now, None
        self.pushes = self.base_len = self.last_id = 0
        self.nodes, self.trees, self.arrivals = {}, [], []

    @property
    def live(self) -> dict[int, Node]:
        return {number: node for number, node in self.nodes.items() if self._hangs(node, len(self.tokens))}

    def hangs(self, number: int, base_len: int) -> bool:
        """Whether the node is the root at `base_len`, or below it."""
        node = self.nodes.get(number)
        return node is not None and (node.position == base_len - 1 or self._hangs(node, base_len))

    def _hangs(self, node: Node, base_len: int) -> bool:
        if node.position < base_len:
            return False
        above: Node | None = node
        while above is not None:
            if above.position < base_len and self.tokens[above.position] != above.token:
                return False
            above = self.nodes.get(above.parent)
        return True


class Referee:
    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.breaches: dict[str, str] = {}
        self.counts = Counter[str]()
        self.trees = self.nodes = 0

    def breach(self, rule: str, detail: str) -> None:
        self.counts[rule] += 1
        self.breaches.setdefault(rule, detail)

    def tree(self, session: PlayedSession, tree: Tree) -> None:
        if session.lossy and tree.sequence < session.pushes:
            return  # it came twice
        self.trees += 1
        self.nodes += len(tree.ids)
        what = f"session {tree.session}, generation {tree.generation}, Tree {tree.sequence}"
        if tree.sequence != session.pushes and not session.lossy:
            self.breach("tree-sequence", f"{what}: it is number {session.pushes} that was to come")
        session.pushes = tree.sequence + 1
        if not session.base_len <= tree.base_len <= session.told:
            least, most = session.base_len, session.told
            self.breach("tree-base-len", f"{what}: base_len {tree.base_len}, which is not {least} to {most}")
        session.base_len = max(session.base_len, tree.base_len)
        self._nodes(session, tree, what)

    def _nodes(self, session: PlayedSession, tree: Tree, what: str) -> None:
        base_len = min(tree.base_len, len(session.tokens))
        for number, parent, token, score in zip(tree.ids, tree.parents, tree.tokens, tree.scores, strict=True):
            if number <= session.last_id:
                self.breach("tree-ids", f"{what}: id {number} comes after {session.last_id}")
            session.last_id = max(session.last_id, number)
            if token >= self.vocab_size:
                self.breach("tree-vocabulary", f"{what}: token {token}; vocab_size is {self.vocab_size}")
            if not -math.inf < score <= 0:
                self.breach("tree-scores", f"{what}: score {score}")
            known = parent == 0 or session.hangs(parent, base_len)
            if not known and not session.lossy:
                self.breach("tree-parents", f"{what}: parent {parent} of node {number} is not below its root")
            position = base_len if parent == 0 or not known else session.nodes[parent].position + 1
            session.nodes[number] = Node(parent if known else 0, token, position)
