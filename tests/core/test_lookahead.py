"""Lookahead trees against a reference of plain nodes: what survives a commit, what is freed, what comes next."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import paths_of, tree_of

from pilotfish.core.trees.lookahead import Lookahead, NewNodes, path_table

#: More levels, and more nodes, than any tree here has.
DEEP, WHOLE = 1000, 1 << 20


@dataclass(eq=False)
class Plain:
    """A node that knows its parent and its children."""

    number: int  # its newest
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

    def expand(self, node: Plain, children: dict[int, float]) -> None:
        """For the first time, or again: then children that it has get their new chance, and a new number."""
        if node is not self.root and node.slot is None:
            node.slot, self.next_slot = self.next_slot, self.next_slot + 1
        for token, chance in children.items():
            child = next((child for child in node.children if child.token == token), None)
            if child is None:
                node.children.append(child := Plain(0, token, chance, node))
            child.number, child.chance, self.next_id = self.next_id, chance, self.next_id + 1

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
    slots = dict(zip(tree.expanded, tree.slots, strict=True))
    nodes = tree.likeliest(WHOLE)
    return sorted((tree._ids[node], tuple(tree.path_tokens(node)), slots.get(node)) for node in nodes)


CHANCES = st.one_of(st.sampled_from([0.0, -0.5, -1.0]), st.floats(-9.0, 0.0))
CHILDREN = st.dictionaries(st.integers(0, 5), CHANCES, max_size=4)


def grow(tree: Lookahead, plain: PlainTree, leaves: list[int], children: list[dict[int, float]]) -> NewNodes:
    """Expand nodes of both, or the root, as a level does: what is too unlikely is left out before."""
    numbers = {node.number: node for node in plain.root.below()}
    nodes = [plain.root if leaf == tree.root else numbers[tree._ids[leaf]] for leaf in leaves]
    grown = [leaf for leaf in leaves if leaf != tree.root]
    new = [node for node in nodes if node is not plain.root and node.slot is None]
    assert tree.lacking(grown) == len(new)
    kept = []
    for node, below in zip(nodes, children, strict=True):
        kept.append({token: chance for token, chance in below.items() if node.score + chance > Lookahead.FLOOR})
        plain.expand(node, kept[-1])
    tree.expand(grown, [node.slot or 0 for node in new])
    tokens, chances = ([x for below in kept for x in part(below)] for part in (dict.keys, dict.values))
    return tree.add(leaves, [len(below) for below in kept], tokens, chances, DEEP)


@given(st.data())
def test_a_life_equals_that_of_plain_nodes(data: st.DataObject) -> None:
    """Random growth and commits, after some of which what is left is expanded again: the same nodes, slots freed once
    each, none twice, none lost."""
    tree, plain, grown, names = Lookahead(), PlainTree(), False, defaultdict[Plain, set[int]](set)
    for _ in range(data.draw(st.integers(1, 12))):
        again = not grown or data.draw(st.integers(0, 3)) == 0
        leaves = [tree.root] if again else tree.leaves(data.draw(st.integers(1, 5)))
        before = {entry[0] for entry in described(tree)}
        added = grow(tree, plain, leaves, [data.draw(CHILDREN) for _ in leaves])
        grown = True
        assert described(tree) == plain.described() and len(tree) == len(plain.described())
        assert added.ids == [entry[0] for entry in described(tree) if entry[0] not in before]
        numbers = {node.number: node for node in plain.root.below()}
        for number, node in numbers.items():
            names[node].add(number)
        told = zip(added.ids, added.parents, added.tokens, added.chances, strict=True)
        for number, parent, token, chance in told:
            node = numbers[number]
            assert parent in ({0} if node.parent is plain.root else names[node.parent])  # type: ignore[index]
            assert (node.token, node.chance) == (token, chance)
        scores = {node.number: node.score for node in plain.root.below()}
        assert {tree._ids[node]: tree.score(node) for node in tree.likeliest(WHOLE)} == pytest.approx(scores)
        owned = set(tree.slots)
        assert len(owned) == len(tree.slots)
        if data.draw(st.booleans()):
            tokens = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
            rerooted = tree.commit(tokens)
            hit, path, freed = plain.commit(tokens)
            assert (rerooted.hit, rerooted.path_slots, set(rerooted.freed)) == (hit, path, freed)
            assert len(rerooted.freed) == len(freed)
            kept = set(tree.slots)
            assert kept | set(path) | freed == owned and not kept & freed and not set(path) & (kept | freed)
            assert described(tree) == plain.described()
            grown = hit and len(path) == len(tokens)
    held, next_id = tree.slots, plain.next_id
    assert sorted(tree.drop()) == sorted(held) and len(tree) == 0
    assert tree.add([tree.root], [1], [0], [0.0], DEEP).ids == [next_id]  # ids go on


def some_tree(data: st.DataObject) -> Lookahead:
    """Levels of random leaves, with commits in between; chances that often are equal."""
    tree, slots = Lookahead(), itertools.count(100)
    leaves = [tree.root]
    for _ in range(data.draw(st.integers(0, 6))):
        if leaves != [tree.root]:
            tree.expand(leaves, [next(slots) for _ in leaves])
        counts = data.draw(st.lists(st.integers(0, 5), min_size=len(leaves), max_size=len(leaves)))
        tokens = [token for count in counts for token in range(count)]
        chances = data.draw(st.lists(st.sampled_from([0.0, -0.25, -1.0]), min_size=sum(counts), max_size=sum(counts)))
        tree.add(leaves, counts, tokens, chances, DEEP)
        if tree.expanded and data.draw(st.booleans()):
            tree.commit(tree.path_tokens(data.draw(st.sampled_from(tree.expanded))))
        leaves = tree.leaves(data.draw(st.integers(1, 4)))
        if not leaves:
            break
    return tree


@given(st.data())
def test_leaves_are_the_likeliest_without_kv_and_the_older_of_equals(data: st.DataObject) -> None:
    tree, count = some_tree(data), data.draw(st.integers(0, 45))
    waiting = sorted(set(tree.likeliest(WHOLE)) - set(tree.expanded))
    expected = sorted(waiting, key=lambda node: -tree.score(node))
    assert tree.leaves(count) == expected[:count] and len(tree.open) == len(expected)
    offers = [(node, -cost - tree.root_score) for cost, node in tree.open]
    assert offers == [(node, tree.score(node)) for node in expected]


@given(st.integers(1, 4))
def test_nodes_as_deep_as_can_be_are_not_expanded(max_depth: int) -> None:
    tree, leaves, levels = Lookahead(), [0], 0
    while leaves:
        if leaves != [tree.root]:
            tree.expand(leaves, range(len(leaves)))
        tree.add(leaves, [1] * len(leaves), [levels] * len(leaves), [-0.5] * len(leaves), max_depth)
        leaves, levels = tree.leaves(3), levels + 1
    assert levels == max_depth == max(map(tree.depth, tree.likeliest(WHOLE)))


@given(st.data())
def test_paths_are_the_slots_from_below_the_root(data: st.DataObject) -> None:
    tree = some_tree(data)
    slots = dict(zip(tree.expanded, tree.slots, strict=True))
    nodes = data.draw(st.lists(st.sampled_from(tree.expanded), max_size=24)) if tree.expanded else []
    table = path_table([tree.path(node) for node in nodes])
    assert table.shape == (len(nodes), max(map(tree.depth, nodes), default=0)) and table.dtype == np.int32
    for row, node in zip(table.tolist(), nodes, strict=True):
        path = tree.follow(tree.path_tokens(node))
        assert path[-1] == node and len(path) == tree.depth(node)
        assert row == [*(slots[each] for each in path), *[0] * (len(row) - len(path))]


@given(st.data())
def test_what_is_forgotten_was_dead(data: st.DataObject) -> None:
    """A tree whose dead nodes are forgotten at once, beside one that keeps them."""
    tree = some_tree(data)
    twin = copy.deepcopy(tree)
    twin._clean_up()
    assert described(twin) == described(tree)
    assert [twin.path_tokens(leaf) for leaf in twin.leaves(WHOLE)] == [tree.path_tokens(x) for x in tree.leaves(WHOLE)]
    assert paths_of(tree_of(twin)) == paths_of(tree_of(tree))
    assert len(twin._tokens) == len(twin) + 1
