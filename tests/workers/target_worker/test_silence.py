"""Pools that say nothing for a while: a slow chip keeps what it computes, a dead one is opened less and less often."""

import logging
from collections import deque
from itertools import pairwise

import pytest
from side import Side, load, make_request, tree

from pilotfish.core.drafting.messages import Close, Commit, Hello, Open, ToDraft
from pilotfish.core.drafting.pools import MAX_DOUBLINGS, PATIENCE_ALONE
from pilotfish.core.peers.fields import Peer
from pilotfish.core.peers.peer import BACK, SILENCE
from pilotfish.core.scheduling.request import Request

#: Seconds of a step of the target.
STEP = 0.05
REPORT = 0.2


class Chip:
    """A draft of one thread: while it reads a prompt it hears and says nothing."""

    def __init__(self, side: Side, prefill: float, peer: Peer = b"0") -> None:
        self.side, self.prefill, self.peer = side, prefill, peer
        self.inbox: deque[ToDraft] = deque()
        self.opened: list[float] = []  # when the target sent each Open
        self.sessions: dict[int, Open] = {}
        self.lengths: dict[int, int] = {}
        self._reading: Open | None = None
        self._busy_until = 0.0
        self._reported = 0.0

    def turn(self) -> None:
        """What it does at this moment."""
        said = [message for to, message in self.side.posted if to == self.peer]
        self.side.posted = [(to, message) for to, message in self.side.posted if to != self.peer]
        self.opened += [self.side.now for message in said if isinstance(message, Open)]
        self.inbox.extend(said)
        if self.side.now < self._busy_until:
            return
        if self._reading is not None:
            opened, self._reading = self._reading, None
            self._push(opened)
        while self.inbox and self._reading is None:
            self._take(self.inbox.popleft())
        if self._reading is None and self.side.now - self._reported >= REPORT:
            self._reported = self.side.now
            self.side.hear(load(), self.peer)

    def _push(self, opened: Open) -> None:
        self.sessions[opened.session] = opened
        self.lengths[opened.session] = len(opened.tokens)
        push = tree(opened, 0, len(opened.tokens), *((token + 1, 0, token, -1.0) for token in range(100)))
        self.side.hear(push, self.peer)

    def _take(self, message: ToDraft) -> None:
        if isinstance(message, Open):
            self._reading, self._busy_until = message, self.side.now + self.prefill
        elif isinstance(message, Close):
            self.sessions.pop(message.session, None)
        elif isinstance(message, Commit):
            assert self.lengths[message.session] == message.base_len  # it can follow
            self.lengths[message.session] += len(message.tokens)


class DeadOnOpen(Chip):
    """Answers as long as it has no session, and never once it has one."""

    def turn(self) -> None:
        said = [message for to, message in self.side.posted if to == self.peer]
        self.side.posted = [(to, message) for to, message in self.side.posted if to != self.peer]
        for message in said:
            if isinstance(message, Open):
                self.opened.append(self.side.now)
                self.sessions[message.session] = message
            elif isinstance(message, Close):
                self.sessions.pop(message.session, None)
            elif isinstance(message, Hello) and not self.sessions:
                self.side.hear(load(), self.peer)


def steps(side: Side, chips: list[Chip], request: Request, seconds: float, each: float = STEP) -> list[int]:
    """Steps of a target that asks for guesses and commits a token in each; nodes of the tree that each had."""
    nodes = []
    until = side.now + seconds
    while side.now < until:
        side.let_pass(each)
        for chip in chips:
            chip.turn()
        nodes.append(len(side.propose(request)[0]))
        side.commit(request, 7)
    return nodes


@pytest.mark.parametrize("prefill", [0.5, 3.0, 20.0])
def test_a_slow_prompt_is_read_once_and_its_tree_used(prefill: float, caplog: pytest.LogCaptureFixture) -> None:
    side, request = Side(), make_request(max_tokens=5000)
    chip = Chip(side, prefill)
    with caplog.at_level(logging.WARNING):
        nodes = steps(side, [chip], request, prefill + 1.0)
    assert len(chip.opened) == 1
    assert side.pools[0].score.trees == 1 and chip.sessions
    assert max(nodes) == 0  # what it read is committed long since: its tree is late
    chip.lengths[1] = len(request.tokens)
    opened = chip.sessions[1]
    side.hear(tree(opened, 1, len(request.tokens), (500, 0, 7, -0.5), (501, 500, 8, -0.5)))
    assert [len(one) for one in side.propose(request)] == [2]
    assert len([r for r in caplog.records if "silent" in r.message]) == (prefill > SILENCE)


def test_prompt_after_prompt_is_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """And one when it has answered for a while."""
    side = Side()
    chip = Chip(side, 1.5)
    with caplog.at_level(logging.WARNING):
        for number in range(12):
            request = make_request(number, max_tokens=5000)
            steps(side, [chip], request, 2.0)
            side.drafter.close(request)
        assert side.pools[0]._unreported_losses == 12 == len(chip.opened)
        (record,) = caplog.records
        assert record.message == f"pool 0 has been silent for {SILENCE:.1f} s; its sequences go on without it"
        steps(side, [chip], make_request(99, max_tokens=5000), 2.0 + BACK)
    assert [r.message for r in caplog.records][1:] == ["pool 0 is back; it was silent or gone 13 times"]


def test_a_silent_pool_is_told_all_when_it_speaks_again() -> None:
    side, request = Side(), make_request(max_tokens=5000)
    side.propose(request)
    side.said(Open)
    side.let_pass(SILENCE + 0.1)
    for token in (3, 4, 5):
        side.propose(request)
        side.commit(request, token)
    assert not side.said(Commit)
    side.hear(load())
    side.propose(request)
    assert [(c.base_len, c.tokens) for c in side.said(Commit)] == [(5, [3, 4, 5])]


def test_any_word_of_a_pool_ends_its_silence() -> None:
    side, request = Side(), make_request()
    opened = side.opened(request)
    side.let_pass(SILENCE + 0.1)
    assert not side.pools[0].ready
    side.hear(tree(opened, 0, 5, (1, 0, 7, -0.5)))
    assert side.pools[0].ready and len(side.propose(request)[0]) == 1


def test_a_silent_pool_gets_no_new_sessions() -> None:
    side = Side()
    side.propose(make_request(0))
    assert len(side.said(Open)) == 1
    side.let_pass(SILENCE + 0.1)
    assert [len(one) for one in side.propose(make_request(0), make_request(1))] == [0, 0]
    assert not side.said(Open) and not side.said(Close)


def test_a_pool_that_dies_of_every_session_is_opened_less_and_less_often() -> None:
    side, request = Side(), make_request(max_tokens=200_000)
    chip = DeadOnOpen(side, 0.0)
    steps(side, [chip], request, 4000.0, each=0.25)
    gaps = [later - sooner for sooner, later in pairwise(chip.opened)]
    longest = PATIENCE_ALONE * 2**MAX_DOUBLINGS
    assert len(chip.opened) >= 7 and gaps[0] >= PATIENCE_ALONE
    assert all(1.8 * sooner < later or later >= longest for sooner, later in pairwise(gaps))
    assert max(gaps) <= longest + 2.0  # and it is tried again


def test_two_slow_pools_do_not_hand_a_session_to_and_fro_for_ever() -> None:
    side, request = Side(pools=2), make_request(max_tokens=20_000)
    chips = [Chip(side, 5.0, b"0"), Chip(side, 5.0, b"1")]
    steps(side, chips, request, 60.0)
    assert sum(pool.score.trees for pool in side.pools) >= 1
    before = [len(chip.opened) for chip in chips]
    assert sum(before) <= 8
    steps(side, chips, request, 60.0)
    assert [len(chip.opened) for chip in chips] == before


def test_sessions_of_a_pool_that_hung_up_are_not_kept() -> None:
    """Silence may be work; nobody at the other end is not."""
    side, request = Side(), make_request()
    side.propose(request)
    side.let_pass(SILENCE + 0.1)
    assert not side.said(Close)
    side.problems[b"0"] = "pool 0 hung up"
    side.drafter.tick()
    assert len(side.said(Close)) == 1 and not side.pools[0].sessions


def test_a_pool_that_answers_for_a_while_is_trusted_anew() -> None:
    side, request = Side(), make_request(max_tokens=200_000)
    dead = DeadOnOpen(side, 0.0)
    steps(side, [dead], request, 5.0 * PATIENCE_ALONE)
    assert len(dead.opened) == 3
    side.drafter.close(request)
    for _ in range(70):
        side.now += 1.0
        side.hear(load())
        side.drafter.tick()
    again = make_request(1, max_tokens=200_000)
    fresh = DeadOnOpen(side, 0.0)
    steps(side, [fresh], again, PATIENCE_ALONE + 10.0)
    assert len(fresh.opened) == 2
