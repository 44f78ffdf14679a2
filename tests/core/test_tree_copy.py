"""A target's copy of a draft's tree: equal when all is delivered, a tree whatever is."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trees import check_tree

from pilotfish.core.lookahead import LEAST, GrownTree, Lookahead, TreeCopy
from pilotfish.core.messages import PushedNodes

VOCAB = 8


def make_push(base_len: int, *nodes: tuple[int, int, int, float]) -> PushedNodes:
    """Of (id, parent, token, score)."""
    ids, parents, tokens, scores = zip(*nodes, strict=True) if nodes else ((), (), (), ())
    integers = (np.array(x, np.int64) for x in (ids, parents, tokens))
    return PushedNodes(1, 1, 0, base_len, *integers, np.array(scores, np.float64))


def paths(nodes: GrownTree) -> dict[tuple[int, ...], float]:
    """Score of each path."""
    found: list[tuple[int, ...]] = []
    for parent, token in zip(nodes.parents.tolist(), nodes.tokens.tolist(), strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    assert len(set(found)) == len(found)
    return dict(zip(found, nodes.scores.tolist(), strict=True))


class Draft:
    """Grows a tree, and says what it pushes."""

    def __init__(self, length: int) -> None:
        self.tree, self.length, self.rooted = Lookahead(), length, False

    def grow(self, data: st.DataObject) -> PushedNodes | None:
        """One level."""
        leaves = self.tree.leaves(data.draw(st.integers(1, 3)), 50) if self.rooted else np.array([-1])
        if not len(leaves):
            return None
        for leaf in leaves.tolist():
            if leaf >= 0:
                self.tree.expand(leaf, 0)
        self.rooted = True
        children = [data.draw(st.sets(st.integers(0, VOCAB - 1), max_size=3)) for _ in leaves]
        parents = np.repeat(leaves, [len(x) for x in children])
        tokens = np.array([token for x in children for token in sorted(x)], np.int64)
        chances = np.array(data.draw(st.lists(st.floats(-4.0, 0.0), min_size=len(tokens), max_size=len(tokens))))
        added = self.tree.add(parents, tokens, chances)
        nodes = self.tree.nodes
        above = np.append(nodes.scores, 0.0)[added.parents]
        ids = np.append(nodes.ids, 0)[added.parents]
        return PushedNodes(1, 1, 0, self.length, added.ids, ids, added.tokens, added.scores - above)

    def commit(self, tokens: list[int]) -> None:
        path = self.tree.nodes.follow(tokens)
        expanded = len(path) == len(tokens) and self.tree.nodes.slots[path[-1]] >= 0
        self.tree.commit(tokens)
        self.length, self.rooted = self.length + len(tokens), bool(expanded)


def some_tokens(data: st.DataObject, tree: Lookahead) -> list[int]:
    """A path of the tree, or a part of one, and maybe a token that is in no tree."""
    path = tree.nodes.path_tokens(data.draw(st.integers(0, len(tree) - 1))) if len(tree) else []
    extra = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=not path, max_size=2))
    return [*path, *extra]


@given(st.data())
def test_when_all_is_delivered_the_copy_is_the_drafts_tree(data: st.DataObject) -> None:
    """Pushes wait while the target commits, and commits while the draft pushes; both in order."""
    draft, copy = Draft(5), TreeCopy(5, VOCAB, 10_000)
    pushes: deque[PushedNodes] = deque()
    commits: deque[list[int]] = deque()
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["grow", "grow", "deliver", "deliver", "commit", "hear"]))
        if action == "grow" and (push := draft.grow(data)) is not None:
            pushes.append(push)
        elif action == "deliver" and pushes:
            copy.attach(pushes.popleft())
        elif action == "commit":
            commits.append(some_tokens(data, draft.tree))
            copy.commit(commits[-1])
        elif action == "hear" and commits:
            draft.commit(commits.popleft())
        check_tree(copy.nodes)
    for tokens in commits:
        draft.commit(tokens)
    for push in pushes:
        copy.attach(push)
    assert paths(copy.nodes) == pytest.approx(paths(draft.tree.nodes), abs=1e-9)
    assert copy.nodes.ids.tolist() == draft.tree.nodes.ids.tolist()
    assert copy.dropped == copy.repeated == 0


NUMBERS = st.one_of(st.integers(-3, 12), st.integers(-(2**62), 2**62))
HOSTILE = st.lists(
    st.tuples(NUMBERS, NUMBERS, NUMBERS, st.one_of(st.floats(-2.0, 0.0), st.floats())), min_size=0, max_size=12
)


@given(st.data())
def test_whatever_is_pushed_it_stays_a_tree(data: st.DataObject) -> None:
    """Ids that fall or repeat, parents that come later, are themselves or are none, any token, any score."""
    copy, most = TreeCopy(5, VOCAB, 20), 20
    for _ in range(data.draw(st.integers(1, 8))):
        nodes = data.draw(HOSTILE)
        if data.draw(st.booleans()):  # rise, so that not all are dropped
            nodes = sorted({node: (node, *rest) for node, *rest in nodes}.values())
        base_len = data.draw(st.one_of(st.integers(3, 20), NUMBERS))
        copy.attach(make_push(base_len, *nodes))
        check_tree(copy.nodes)
        assert len(copy.nodes) <= most
        assert ((copy.nodes.tokens >= 0) & (copy.nodes.tokens < VOCAB)).all()
        assert np.isfinite(copy.nodes.scores).all()
        assert len(copy.nodes.take(copy.nodes.best(6))) == min(6, len(copy.nodes))
        if data.draw(st.booleans()):
            copy.commit(data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3)))
            check_tree(copy.nodes)


@st.composite
def plausible(draw: st.DrawFn) -> list[tuple[int, int, int, float]]:
    """Nodes of one push, parents 0 or any node before, tokens that may repeat."""
    count = draw(st.integers(1, 15))
    nodes = []
    for node in range(1, count + 1):
        parent, token = draw(st.integers(0, node - 1)), draw(st.integers(0, 3))
        nodes.append((node, parent, token, draw(st.sampled_from([-0.25, -0.5, -1.0]))))
    return nodes


@given(plausible(), st.lists(st.integers(0, 3), max_size=3))
def test_repeats_are_merged_into_the_first(nodes: list[tuple[int, int, int, float]], committed: list[int]) -> None:
    """In one push, or node by node; with commits in between or after: as if paths had been pushed."""
    expected: dict[tuple[int, ...], float] = {}
    path = {0: ()}
    for node, parent, token, score in nodes:
        path[node] = (*path[parent], token)
        expected.setdefault(path[node], expected.get(path[parent], 0.0) + score)
    at_once, singly = TreeCopy(5, VOCAB, 100), TreeCopy(5, VOCAB, 100)
    at_once.attach(make_push(5, *nodes))
    for node in nodes:
        singly.attach(make_push(5, node))
    for copy in (at_once, singly):
        assert paths(copy.nodes) == pytest.approx(expected)
        assert copy.repeated == len(nodes) - len(expected)
    if committed:
        at_once.commit(committed)
    size, root = len(committed), expected.get(tuple(committed), 0.0)
    left = {p[size:]: s - root for p, s in expected.items() if len(p) > size and p[:size] == tuple(committed)}
    if tuple(committed) in expected or not committed:
        assert paths(at_once.nodes) == pytest.approx(left)
    # what comes below a repeated node later, also across the commit, lands below the first
    for number, (node, *_) in enumerate(nodes):
        at_once.attach(make_push(5, (100 + number, node, 7, -0.5)))
    below = {p for p in path.values() if p and p[:size] == tuple(committed)} if tuple(committed) in expected else set()
    if committed:
        assert {p for p in paths(at_once.nodes) if p[-1] == 7} == {(*p[size:], 7) for p in below}


@given(plausible())
def test_one_by_one_equals_together(nodes: list[tuple[int, int, int, float]]) -> None:
    """Levels without repeats go in together; the other way gives the same."""
    first = {(parent, token): (node, parent, token, score) for node, parent, token, score in reversed(nodes)}
    together, singly = TreeCopy(5, VOCAB, 100), TreeCopy(5, VOCAB, 100)
    level, number, names = {0}, 0, {0: 0}
    while level:
        rows = sorted(row for (parent, _), row in first.items() if parent in level)
        # ids rise from push to push
        known, names = names, {row[0]: number + i + 1 for i, row in enumerate(rows)}
        push = make_push(5, *((names[n], known[p], t, s) for n, p, t, s in rows))
        together.attach(push)
        if rows:
            singly._attach_one_by_one(push, singly._parents(push, push.parents))
        level, number = set(names), number + len(rows)
    for mine, other in zip(vars(together.nodes).values(), vars(singly.nodes).values(), strict=True):
        assert mine.tolist() == other.tolist()
    assert singly.repeated == together.repeated == 0


def test_a_push_that_was_on_its_way_during_a_commit() -> None:
    """The figure of the module."""
    copy = TreeCopy(4, 100, 50)
    copy.attach(make_push(4, (17, 0, 9, -0.5)))
    assert copy.commit([9])
    copy.attach(make_push(4, (20, 17, 1, -0.1), (21, 17, 2, -0.2), (22, 0, 3, -0.3)))
    assert paths(copy.nodes) == {(1,): -0.1, (2,): -0.2}
    assert (copy.late, copy.dropped, copy.repeated) == (1, 0, 0)


def test_a_commit_deeper_than_what_had_arrived() -> None:
    """9 was there, 8 and what hangs below it were on their way: a miss that later turns out half a hit."""
    copy = TreeCopy(4, 100, 50)
    copy.attach(make_push(4, (1, 0, 9, -0.5)))
    assert not copy.commit([9, 8])
    copy.attach(make_push(4, (2, 1, 8, -0.5), (3, 1, 7, -0.5)))
    copy.attach(make_push(4, (4, 2, 6, -0.5)))
    copy.attach(make_push(6, (5, 0, 5, -0.5), (6, 0, 4, -0.5)))  # the draft knows: 0 names the root
    assert set(paths(copy.nodes)) == {(6,), (5,), (4,)}


def test_a_draft_that_lost_its_tree_pushes_the_same_again() -> None:
    """Eviction: what it grows anew joins what is still here."""
    copy = TreeCopy(4, 100, 50)
    copy.attach(make_push(4, (1, 0, 9, -0.5), (2, 0, 8, -1.0)))
    copy.attach(make_push(4, (3, 0, 9, -0.5), (4, 3, 7, -0.25)))
    assert paths(copy.nodes) == {(9,): -0.5, (8,): -1.0, (9, 7): -0.75}
    assert copy.commit([9])
    copy.attach(make_push(4, (5, 3, 6, -0.5)))
    assert paths(copy.nodes) == {(7,): -0.25, (6,): -0.5}
    assert (copy.repeated, copy.dropped) == (1, 0)


@pytest.mark.parametrize(
    "push",
    [
        make_push(6, (1, 0, 1, -0.5)),  # longer than the target's
        make_push(4, (1, 0, 1, -0.5)),  # older than all that is remembered
        make_push(5, (1, 0, VOCAB, -0.5)),
        make_push(5, (1, 0, -1, -0.5)),
        make_push(5, (1, 0, 1, np.nan)),
        make_push(5, (2, 0, 1, -0.5), (1, 0, 2, -0.5)),
        make_push(5, (0, 0, 1, -0.5)),
    ],
    ids=["ahead", "ancient", "token", "negative", "score", "falling", "zero"],
)
def test_what_no_draft_may_send_is_dropped_and_counted(push: PushedNodes) -> None:
    copy = TreeCopy(5, VOCAB, 20)
    copy.attach(push)
    assert len(copy.nodes) == 0 and copy.dropped == len(push)


@pytest.mark.parametrize("parents", [(1, 0), (2, 0), (0, 2), (2, 1), (3, 3)], ids=str)
def test_parents_that_do_not_come_first(parents: tuple[int, int]) -> None:
    """Later ones, and nodes that are their own: what hangs from them hangs nowhere."""
    copy = TreeCopy(5, VOCAB, 20)
    copy.attach(make_push(5, *((i, parent, i, -0.5) for i, parent in enumerate(parents, 1)), (3, 0, 3, -0.5)))
    check_tree(copy.nodes)
    assert set(paths(copy.nodes)) == {(3,)} | {(i,) for i, parent in enumerate(parents, 1) if parent == 0}


def test_a_late_node_that_is_repeated_and_was_committed() -> None:
    """The first of them is the root now."""
    copy = TreeCopy(5, VOCAB, 20)
    copy.commit([7])
    copy.attach(make_push(5, (1, 0, 7, -0.5), (2, 0, 7, -0.5), (3, 1, 4, -0.5)))
    assert set(paths(copy.nodes)) == {(4,)}


def test_no_more_than_max_nodes() -> None:
    """Nor more aliases: a node repeated without end is no way to fill the memory."""
    copy = TreeCopy(5, VOCAB, 3)
    copy.attach(make_push(5, *((node, 0, node, -0.5) for node in range(1, 6))))
    assert (len(copy.nodes), copy.dropped) == (3, 2)
    copy = TreeCopy(5, VOCAB, 3)
    copy.attach(make_push(5, *((node, 0, 1, -0.5) for node in range(1, 6))))
    copy.attach(make_push(5, *((node, 0, 1, -0.5) for node in range(6, 9))))
    assert (len(copy.nodes), copy.repeated, copy.dropped) == (1, 2, 5)


def test_scores_without_a_bottom_stay_numbers() -> None:
    copy = TreeCopy(5, VOCAB, 20)
    copy.attach(make_push(5, (1, 0, 1, -np.inf), (2, 1, 2, -np.inf), (3, 2, 3, -1.0)))
    assert copy.nodes.scores.tolist() == [LEAST, 2 * LEAST, 2 * LEAST - 1]
    copy.commit([1])
    assert copy.nodes.scores.tolist() == [LEAST, LEAST - 1]


def test_a_long_chain_and_a_wide_repeat_of_the_largest_push() -> None:
    """As many nodes as a frame may hold, each below the one before; then all of them again."""
    count = 1 << 14
    ids = np.arange(1, count + 1)
    chain = PushedNodes(1, 1, 0, 5, ids, ids - 1, ids % VOCAB, np.full(count, -0.001))
    copy = TreeCopy(5, VOCAB, 2 * count)
    copy.attach(chain)
    again = replace(chain, ids=ids + count, parents=np.where(ids == 1, 0, ids + count - 1))
    copy.attach(again)
    assert (len(copy.nodes), copy.repeated, copy.dropped) == (count, count, 0)
    assert int(copy.nodes.depths[-1]) == count
