"""A target's copy of a draft's tree: equal when all is delivered, a tree whatever is."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from sizes import sized
from support import paths_of, tree_of
from trees import check_tree

from pilotfish.core.drafting.messages import Tree
from pilotfish.core.trees.lookahead import LivingTree, Lookahead
from pilotfish.core.trees.tree import OTHER
from pilotfish.core.trees.tree_copy import LEAST, TreeCopy

VOCAB = 8


def make_push(base_len: int, *nodes: tuple[int, int, int, float]) -> Tree:
    """Of (id, parent, token, score)."""
    columns = [list(x) for x in zip(*nodes, strict=True)] or [[], [], [], []]
    return Tree(1, 1, 0, base_len, *columns)


def paths(tree: LivingTree) -> dict[tuple[int, ...], float]:
    """Score of each path."""
    nodes = tree_of(tree)
    found = paths_of(nodes)
    assert len(found) == len(nodes)
    return found


class Draft:
    """Grows a tree, and says what it pushes."""

    def __init__(self, length: int) -> None:
        self.tree, self.length, self.rooted = Lookahead(), length, False

    def grow(self, data: st.DataObject) -> Tree | None:
        """One level."""
        leaves = self.tree.leaves(data.draw(st.integers(1, 3))) if self.rooted else [self.tree.root]
        if not leaves:
            return None
        if self.rooted:
            self.tree.expand(leaves, [0] * len(leaves))
        self.rooted = True
        children = [sorted(data.draw(st.sets(st.integers(0, VOCAB - 1), max_size=3))) for _ in leaves]
        tokens = [token for below in children for token in below]
        chances = data.draw(st.lists(st.floats(-4.0, 0.0), min_size=len(tokens), max_size=len(tokens)))
        added = self.tree.add(leaves, [len(below) for below in children], tokens, chances, 50)
        return Tree(1, 1, 0, self.length, added.ids, added.parents, added.tokens, added.chances)

    def commit(self, tokens: list[int]) -> None:
        path = self.tree.follow(tokens)
        self.rooted = len(path) == len(tokens) and path[-1] in self.tree.expanded
        self.tree.commit(tokens)
        self.length += len(tokens)


@given(st.data())
def test_when_all_is_delivered_the_copy_is_the_drafts_tree(data: st.DataObject) -> None:
    """Pushes wait while the target commits, and commits while the draft pushes; both in order."""
    draft, copy = Draft(5), TreeCopy(5, VOCAB, 10_000)
    pushes: deque[Tree] = deque()
    commits: deque[list[int]] = deque()
    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["grow", "grow", "deliver", "deliver", "commit", "hear"]))
        if action == "grow" and (push := draft.grow(data)) is not None:
            pushes.append(push)
        elif action == "deliver" and pushes:
            copy.attach(pushes.popleft())
        elif action == "commit":
            # a path of the tree, or a part of one, and maybe a token that is in no tree
            likely = draft.tree.likeliest(1 << 20) if len(draft.tree) else []
            path = draft.tree.path_tokens(data.draw(st.sampled_from(likely))) if len(draft.tree) else []
            extra = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=not path, max_size=2))
            commits.append([*path, *extra])
            copy.commit(commits[-1])
        elif action == "hear" and commits:
            draft.commit(commits.popleft())
        check_tree(tree_of(copy))
    for tokens in commits:
        draft.commit(tokens)
    for push in pushes:
        copy.attach(push)
    assert paths(copy) == pytest.approx(paths(draft.tree), abs=1e-9)
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
        check_tree(tree_of(copy))
        assert len(tree_of(copy)) <= most
        assert ((tree_of(copy).tokens >= 0) & (tree_of(copy).tokens < VOCAB)).all()
        assert np.isfinite(tree_of(copy).scores).all()
        assert len(copy.likeliest(6)) == min(6, len(tree_of(copy)))
        if data.draw(st.booleans()):
            copy.commit(data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3)))
            check_tree(tree_of(copy))


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
        assert paths(copy) == pytest.approx(expected)
        assert copy.repeated == len(nodes) - len(expected)
    if committed:
        at_once.commit(committed)
    size, root = len(committed), expected.get(tuple(committed), 0.0)
    left = {p[size:]: s - root for p, s in expected.items() if len(p) > size and p[:size] == tuple(committed)}
    if tuple(committed) in expected or not committed:
        assert paths(at_once) == pytest.approx(left)
    # what comes below a repeated node later, also across the commit, lands below the first
    for number, (node, *_) in enumerate(nodes):
        at_once.attach(make_push(5, (100 + number, node, 7, -0.5)))
    below = {p for p in path.values() if p and p[:size] == tuple(committed)} if tuple(committed) in expected else set()
    if committed:
        assert {p for p in paths(at_once) if p[-1] == 7} == {(*p[size:], 7) for p in below}


def test_a_draft_that_begins_anew_after_a_commit_knows_better() -> None:
    copy = TreeCopy(5, VOCAB, 100)
    copy.attach(make_push(5, (1, 0, 7, -0.1), (2, 1, 3, -4.0), (3, 2, 6, -0.5), (4, 0, 3, -3.0)))
    copy.commit([7])
    assert paths(copy) == pytest.approx({(3,): -4.0, (3, 6): -4.5})
    copy.attach(make_push(6, (5, 0, 3, -0.05), (6, 0, 1, -2.0), (7, 5, 6, -1.5)))
    known = {(3,): -0.05, (3, 6): -1.55, (1,): -2.0}
    assert paths(copy) == pytest.approx(known) and copy.repeated == 2
    copy.attach(make_push(6, (8, 0, 3, -0.01)))
    assert paths(copy) == pytest.approx(known), "knows no more than before"
    copy.commit([3])
    assert paths(copy) == pytest.approx({(6,): -1.5})
    copy.attach(make_push(7, (9, 0, 6, -0.2)))
    assert paths(copy) == pytest.approx({(6,): -0.2})


@given(plausible(), st.lists(st.integers(0, 3), max_size=2), st.integers(0, 18))
def test_the_best_are_the_likeliest(nodes: list[tuple[int, int, int, float]], committed: list[int], count: int) -> None:
    """Below the root, whatever it is; nodes of a later push are the younger ones."""
    copy = TreeCopy(5, VOCAB, 100)
    half = len(nodes) // 2
    for part in (nodes[:half], nodes[half:]):
        copy.attach(make_push(5, *part))
    if committed:
        copy.commit(committed)
    expected: dict[tuple[int, ...], float] = {(): 0.0}
    path = {0: ()}
    for node, parent, token, score in nodes:
        path[node] = (*path[parent], token)
        expected.setdefault(path[node], expected[path[parent]] + score)
    size = len(committed)
    below = [p for p in expected if len(p) > size and p[:size] == tuple(committed)]
    best = sorted(below, key=lambda p: -expected[p])[:count]  # a stable sort
    assert list(paths_of(copy.best(count, OTHER).tree())) == [p[size:] for p in best]


@settings(max_examples=sized(12, 200), deadline=None)
@given(st.data())
def test_what_is_forgotten_was_no_longer_in_the_tree(data: st.DataObject) -> None:
    """A long life in which nodes are cleaned up, beside a copy whose nodes never are."""
    copy, keeping, node = TreeCopy(5, VOCAB, 1000), TreeCopy(5, VOCAB, 1000), 0
    keeping._left = 1 << 20
    length, base_len = 5, 5
    for _ in range(data.draw(st.integers(5, 40))):
        if data.draw(st.booleans()):
            tokens = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=2))
            assert copy.commit(tokens) == keeping.commit(tokens)
            length += len(tokens)
        base_len = data.draw(st.integers(base_len, length))
        parents = data.draw(st.lists(st.one_of(st.just(0), st.integers(max(node - 15, 0), node)), max_size=15))
        scores = st.sampled_from([-0.25, -0.5])
        rows = [(node + i, p, data.draw(st.integers(0, 2)), data.draw(scores)) for i, p in enumerate(parents, 1)]
        node += len(rows)
        for each in (copy, keeping):
            each.attach(make_push(base_len, *rows))
        assert paths(copy) == paths(keeping)
        assert (copy.late, copy.dropped, copy.repeated) == (keeping.late, keeping.dropped, keeping.repeated)


def test_a_push_that_was_on_its_way_during_a_commit() -> None:
    """The figure of the module."""
    copy = TreeCopy(4, 100, 50)
    copy.attach(make_push(4, (17, 0, 9, -0.5)))
    assert copy.commit([9])
    copy.attach(make_push(4, (20, 17, 1, -0.125), (21, 17, 2, -0.25), (22, 0, 3, -0.5)))
    assert paths(copy) == {(1,): -0.125, (2,): -0.25}
    assert (copy.late, copy.dropped, copy.repeated) == (1, 0, 0)


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
def test_what_no_draft_may_send_is_dropped_and_counted(push: Tree) -> None:
    copy = TreeCopy(5, VOCAB, 20)
    copy.attach(push)
    assert len(tree_of(copy)) == 0 and copy.dropped == len(push.ids)


def test_a_late_node_that_is_repeated_and_was_committed() -> None:
    """The first of them is the root now."""
    copy = TreeCopy(5, VOCAB, 20)
    copy.commit([7])
    copy.attach(make_push(5, (1, 0, 7, -0.5), (2, 0, 7, -0.5), (3, 1, 4, -0.5)))
    assert set(paths(copy)) == {(4,)}


def test_no_more_than_max_nodes() -> None:
    """Nor more aliases: a node repeated without end is no way to fill the memory."""
    copy = TreeCopy(5, VOCAB, 3)
    copy.attach(make_push(5, *((node, 0, node, -0.5) for node in range(1, 6))))
    assert (len(tree_of(copy)), copy.dropped) == (3, 2)
    copy = TreeCopy(5, VOCAB, 3)
    copy.attach(make_push(5, *((node, 0, 1, -0.5) for node in range(1, 6))))
    copy.attach(make_push(5, *((node, 0, 1, -0.5) for node in range(6, 9))))
    assert (len(tree_of(copy)), copy.repeated, copy.dropped) == (1, 2, 5)


def test_scores_without_a_bottom_stay_numbers() -> None:
    copy = TreeCopy(5, VOCAB, 20)
    copy.attach(make_push(5, (1, 0, 1, -np.inf), (2, 1, 2, -np.inf), (3, 2, 3, -1.0)))
    assert tree_of(copy).scores.tolist() == [LEAST, 2 * LEAST, 2 * LEAST - 1]
    copy.commit([1])
    assert tree_of(copy).scores.tolist() == [LEAST, LEAST - 1]


def test_a_long_chain_and_a_wide_repeat_of_the_largest_push() -> None:
    """As many nodes as a frame may hold, each below the one before; then all of them again."""
    count = 1 << 14
    chain = make_push(5, *((node, node - 1, node % VOCAB, -0.001) for node in range(1, count + 1)))
    copy = TreeCopy(5, VOCAB, 2 * count)
    copy.attach(chain)
    again = replace(chain, ids=[node + count for node in chain.ids], parents=[0, *range(count + 1, 2 * count)])
    copy.attach(again)
    assert (len(tree_of(copy)), copy.repeated, copy.dropped) == (count, count, 0)
    assert int(tree_of(copy).depths[-1]) == count
