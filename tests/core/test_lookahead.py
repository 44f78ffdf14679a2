"""Lookahead trees against a reference of plain nodes: what survives a commit, what is freed, what comes next."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import check_tree

from pilotfish.core.lookahead import NO_SLOT, GrownTree, Lookahead

DEEP = 1000


@dataclass(eq=False)
class Plain:
    """A node that knows its parent and its children."""

    number: int
    token: int
    chance: float  # log, given the parent
    parent: Plain | None = None
    slot: int | None = None
    children: list[Plain] = field(default_factory=list)

    def below(self) -> list[Plain]:
        return [x for child in self.children for x in (child, *child.below())]

    def path(self) -> list[Plain]:
        """From below the root."""
        return [] if self.parent is None else [*self.parent.path(), self]

    @property
    def score(self) -> float:
        return sum(node.chance for node in self.path())


class PlainTree:
    """The reference."""

    def __init__(self) -> None:
        self.root = Plain(0, -1, 0.0)
        self.next_id, self.next_slot = 1, 0

    def expand(self, node: Plain, children: list[tuple[int, float]]) -> None:
        if node is not self.root:
            node.slot, self.next_slot = self.next_slot, self.next_slot + 1
        for token, chance in children:
            if node.score + chance > Lookahead.FLOOR:
                node.children.append(Plain(self.next_id, token, chance, node))
                self.next_id += 1

    def commit(self, tokens: list[int]) -> tuple[bool, list[int], set[int]]:
        """Whether all were there; slots of the path; slots of the dead."""
        before = {node.slot for node in self.root.below() if node.slot is not None}
        path, node = list[Plain](), self.root
        for token in tokens:
            found = next((child for child in node.children if child.token == token), None)
            if found is None:
                break
            path.append(node := found)
        hit = len(path) == len(tokens)
        self.root = node if hit else Plain(0, -1, 0.0)
        self.root.parent = None
        after = {node.slot for node in self.root.below() if node.slot is not None}
        slots = [node.slot for node in path if node.slot is not None]
        return hit, slots, before - after - set(slots)

    def described(self) -> list[tuple[int, tuple[int, ...], int | None]]:
        return sorted((n.number, tuple(x.token for x in n.path()), n.slot) for n in self.root.below())


def described(tree: Lookahead) -> list[tuple[int, tuple[int, ...], int | None]]:
    nodes = tree.nodes
    slots = [None if slot == NO_SLOT else slot for slot in nodes.slots.tolist()]
    return [(int(nodes.ids[i]), tuple(tree.nodes.path_tokens(i)), slots[i]) for i in range(len(nodes))]


CHANCES = st.one_of(st.sampled_from([0.0, -0.5, -1.0]), st.floats(-20.0, 0.0))
CHILDREN = st.dictionaries(st.integers(0, 5), CHANCES, max_size=4).map(lambda x: list(x.items()))


def grow(tree: Lookahead, plain: PlainTree, leaf: int, children: list[tuple[int, float]]) -> GrownTree:
    """Expand the node at index `leaf` (-1: the root) of both."""
    number = 0 if leaf < 0 else int(tree.nodes.ids[leaf])
    node = plain.root if leaf < 0 else next(n for n in plain.root.below() if n.number == number)
    plain.expand(node, children)
    if leaf >= 0:
        assert node.slot is not None
        tree.expand(leaf, node.slot)
    parents, tokens = np.full(len(children), leaf), np.array([token for token, _ in children], np.int64)
    return tree.add(parents, tokens, np.array([chance for _, chance in children], np.float64))


@given(st.data())
def test_a_life_equals_that_of_plain_nodes(data: st.DataObject) -> None:
    """Random growth and commits: the same nodes, slots freed once each, none twice, none lost."""
    tree, plain, grown = Lookahead(), PlainTree(), False
    owned: set[int] = set()
    for _ in range(data.draw(st.integers(1, 12))):
        if not grown:
            grow(tree, plain, -1, data.draw(CHILDREN))
            grown = True
        else:
            for leaf in tree.leaves(data.draw(st.integers(1, 3)), DEEP).tolist():
                grow(tree, plain, leaf, data.draw(CHILDREN))
        check_tree(tree.nodes)
        assert described(tree) == plain.described()
        scores = {node.number: node.score for node in plain.root.below()}
        assert dict(zip(tree.nodes.ids.tolist(), tree.nodes.scores.tolist(), strict=True)) == pytest.approx(scores)
        owned = {slot for slot in tree.nodes.slots.tolist() if slot != NO_SLOT}
        if data.draw(st.booleans()):
            tokens = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
            rerooted = tree.commit(tokens)
            hit, path, freed = plain.commit(tokens)
            assert (rerooted.hit, rerooted.path_slots, set(rerooted.freed)) == (hit, path, freed)
            assert len(rerooted.freed) == len(freed)
            kept = {slot for slot in tree.nodes.slots.tolist() if slot != NO_SLOT}
            assert kept | set(path) | freed == owned and not kept & freed and not set(path) & (kept | freed)
            grown = hit and len(path) == len(tokens)
    held = {slot for slot in tree.nodes.slots.tolist() if slot != NO_SLOT}
    dropped = tree.drop()
    assert set(dropped) == held and len(dropped) == len(held) and len(tree) == 0
    assert tree.add(np.array([-1]), np.array([0]), np.array([0.0])).ids.tolist() == [plain.next_id]  # ids go on


def random_nodes(data: st.DataObject, most: int = 40) -> GrownTree:
    tree = Lookahead()
    for _ in range(data.draw(st.integers(0, most))):
        parent = data.draw(st.integers(-1, len(tree) - 1))
        tree.add(np.array([parent]), np.array([len(tree)]), np.array([data.draw(st.sampled_from([0.0, -0.25, -1.0]))]))
    check_tree(tree.nodes)
    return tree.nodes


@given(st.data())
def test_the_best_are_connected_and_the_older_of_equals(data: st.DataObject) -> None:
    nodes = random_nodes(data)
    count = data.draw(st.integers(0, 45))
    expected = sorted(sorted(range(len(nodes)), key=lambda i: (-nodes.scores[i], i))[:count])
    assert nodes.best(count).tolist() == expected
    tree = nodes.take(nodes.best(count))
    assert len(tree) == len(expected)
    assert {int(nodes.parents[i]) for i in expected} <= {-1, *expected}
    assert tree.tokens.tolist() == nodes.tokens[expected].tolist()
    assert tree.depths.tolist() == nodes.depths[expected].tolist()
    assert tree.scores.tolist() == nodes.scores[expected].tolist()


@given(st.data())
def test_below_is_what_climbing_finds(data: st.DataObject) -> None:
    nodes = random_nodes(data)
    root = data.draw(st.integers(-1, len(nodes) - 1))

    def climbs(index: int) -> bool:
        parent = int(nodes.parents[index])
        return parent == root or (parent >= 0 and climbs(parent))

    assert nodes.below(root).tolist() == [climbs(i) for i in range(len(nodes))]


@given(st.data())
def test_leaves_are_the_best_that_are_open_and_not_too_deep(data: st.DataObject) -> None:
    tree = Lookahead()
    tree.nodes = random_nodes(data)
    closed = data.draw(st.sets(st.integers(0, max(len(tree) - 1, 0)), max_size=len(tree)))
    for index in closed:
        tree.expand(index, index)
    count, deepest = data.draw(st.integers(0, 45)), data.draw(st.integers(0, 6))
    leaves = tree.leaves(count, deepest).tolist()
    scores, depths = tree.nodes.scores, tree.nodes.depths
    allowed = [i for i in range(len(tree)) if i not in closed and depths[i] < deepest]
    assert set(leaves) <= set(allowed) and len(set(leaves)) == len(leaves) == min(count, len(allowed))
    assert scores[leaves].tolist() == sorted(scores[allowed].tolist(), reverse=True)[:count]


@given(st.data())
def test_paths_are_the_slots_from_below_the_root(data: st.DataObject) -> None:
    tree = Lookahead()
    tree.nodes = random_nodes(data)
    for index in range(len(tree)):
        tree.expand(index, 100 + index)
    leaves = np.array(data.draw(st.lists(st.integers(0, max(len(tree) - 1, 0)), max_size=24 * bool(len(tree)))), int)
    paths = tree.paths(leaves)
    assert paths.shape == (len(leaves), max(tree.nodes.depths[leaves].tolist(), default=0))
    for row, leaf in zip(paths.tolist(), leaves.tolist(), strict=True):
        indices = tree.nodes.follow(tree.nodes.path_tokens(leaf))
        assert indices[-1] == leaf
        assert row[: len(indices)] == [100 + index for index in indices]


def test_what_is_no_chance_is_not_kept() -> None:
    """Too small, -inf where fewer tokens survived the filters than there are children, NaN where none did."""
    tree = Lookahead()
    added = tree.add(np.full(4, -1), np.arange(4), np.array([-0.5, Lookahead.FLOOR, -np.inf, np.nan]))
    assert added.tokens.tolist() == tree.nodes.tokens.tolist() == [0]
    assert tree.add(np.array([0]), np.array([9]), np.array([0.5])).scores.tolist() == [-0.5]  # none above its parent's
