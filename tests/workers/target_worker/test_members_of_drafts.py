"""Pools that join, drain and leave while a target serves."""

import pytest
from side import NODES, Side, load, make_request, tree

from pilotfish.core.drafting.messages import Close, Commit, Open
from pilotfish.core.drafting.pools import DraftPool
from pilotfish.core.peers.fields import Peer
from pilotfish.core.peers.peer import BACK, SILENCE

A, B = b"0", b"1"


class Drafted(Side):
    """A target with the pool A, to which its one session was opened, and a tree of it."""

    def __init__(self) -> None:
        super().__init__()
        self.request = make_request()
        (self.opened,) = self.opened_at(A)
        self.hear(tree(self.opened, 0, 5, *NODES))

    def opened_at(self, pool: Peer) -> list[Open]:
        """When its tree is asked for."""
        self.propose(self.request)
        return self.said(Open, pool)


@pytest.fixture
def side() -> Drafted:
    return Drafted()


def join(side: Side) -> DraftPool:
    pool = DraftPool("pool 1", B)
    side.drafter.join(pool)
    side.hear(load(), B)
    return pool


def test_sessions_of_a_pool_that_drains_move_at_their_next_commit(side: Drafted) -> None:
    pool = join(side)
    side.drafter.drain(side.pools[0], True)
    assert len(side.propose(side.request)[0]) == 3 and not side.said(Close)  # what it has guessed is used
    assert side.commit(side.request, 7, 9)
    assert len(side.said(Close, A)) == 1 and not side.said(Commit, A) and not side.pools[0].sessions
    (moved,) = side.opened_at(B)
    assert moved.tokens == side.request.tokens and moved.generation == 2 and len(pool.sessions) == 1
    side.hear(tree(moved, 0, 7, (1, 0, 4, -0.5)), B)
    assert len(side.propose(side.request)[0]) == 1


def test_they_stay_where_no_other_pool_takes_them_and_new_ones_are_not_opened(side: Drafted) -> None:
    side.drafter.drain(side.pools[0], True)
    side.commit(side.request, 7)
    assert len(side.said(Commit, A)) == 1 and not side.said(Close)
    new = make_request(1)
    assert len(side.propose(new)[0]) == 0 and not side.said(Open, A)
    pool = join(side)
    pool.draining = True  # no better
    side.commit(side.request, 8)
    assert side.pools[0].sessions and not side.said(Close)
    pool.draining = False
    side.commit(side.request, 8)
    side.propose(side.request, new)
    assert len(side.said(Close, A)) == 1 and len(side.said(Open, B)) == 2


def test_a_pool_that_leaves_is_told_and_heard_no_more(side: Drafted) -> None:
    side.drafter.leave(side.pools[0])
    assert len(side.said(Close, A)) == 1 and side.drafter.pool_of(side.request) is None
    side.hear(tree(side.opened, 1, 5, (4, 0, 9, -0.1)))
    assert len(side.propose(side.request)[0]) == 0 and not side.posted
    side.commit(side.request, 7)
    pool = join(side)
    (moved,) = side.opened_at(B)
    assert moved.tokens == side.request.tokens and side.drafter.pool_of(side.request) is pool


def test_one_that_drains_may_end_without_a_warning(side: Drafted) -> None:
    side.drafter.drain(side.pools[0], True)
    side.problems[A] = "it hung up"
    side.drafter.tick()
    assert not side.pools[0].ready and not side.pools[0].notices
    side.problems.clear()
    side.drafter.drain(side.pools[0], False)
    for _ in range(20):
        side.now += BACK / 10
        side.hear(load())
        side.drafter.tick()
    side.now += 2 * SILENCE
    side.pools[0].tick(side.now)
    assert len(side.pools[0].notices) == 1  # as ever


def test_targets_that_begin_together_begin_at_different_pools() -> None:
    """Each knows only its own sessions until the pools have told their loads."""
    for first, pool in ((0, A), (1, B), (5, B)):
        side = Side(2, first_pool=first)
        side.propose(make_request(0))
        assert len(side.said(Open, pool)) == 1
        side.propose(make_request(1))
        assert len(side.said(Open, B if pool == A else A)) == 1
