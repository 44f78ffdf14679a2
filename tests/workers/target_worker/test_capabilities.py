"""What a target tells pools beyond Open, Commit and Close, and what it makes of what they tell."""

from collections.abc import Sequence

import msgspec
import pytest
from side import HELLO, NODES, VOCAB, Side, load, make_request, tree
from support import limits

from pilotfish.core.drafting import messages
from pilotfish.core.drafting.pools import MAX_BUSY, PATIENCE
from pilotfish.core.drafting.target_machine import PARKED, PARKED_ALONE
from pilotfish.core.peers.fields import Echo, Error
from pilotfish.core.peers.peer import PERIOD, SILENCE
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.tree import Forest, Guesses
from pilotfish.wire.channel import Received


def able(*capabilities: str, **fields: object) -> object:
    return msgspec.structs.replace(load(capabilities=capabilities), **fields)


def served(*capabilities: str) -> tuple[Side, Request, messages.Open]:
    """A target, its one request, and what a pool of these capabilities was told of it."""
    side, request = Side(), make_request()
    side.hear(able(*capabilities))
    return side, request, side.opened(request)


def step(side: Side, request: Request, tokens: Sequence[int], verified: int = 8) -> None:
    """A step that verifies the best of the request's nodes, and commits."""
    guesses = side.drafter.propose([request], limits(nodes=verified, levels=3))
    side.drafter.verified([request], Forest.of(guesses))
    side.commit(request, *tokens)


# -- feedback


def test_a_pool_is_told_what_became_of_its_nodes() -> None:
    side, request, message = served(messages.FEEDBACK)
    side.hear(tree(message, 0, 5, (1, 0, 7, -0.5), (2, 0, 8, -2.0), (3, 1, 9, -0.25), (4, 2, 9, -0.5)))
    step(side, request, [7, 30], verified=3)
    own = message.session, message.generation
    assert side.posted[-2:] == [
        (b"0", messages.TreeFeedback(*own, 5, verified=[1, 3, 2], accepted=[1])),
        (b"0", messages.Commit(*own, 5, [7, 30], 256)),
    ]
    side.hear(tree(message, 1, 5, (5, 4, 3, -0.1), (6, 3, 4, -0.1)))  # below what is gone
    step(side, request, [3])
    assert side.said(messages.TreeFeedback)[-1] == messages.TreeFeedback(*own, 7, late=[5, 6])
    step(side, request, [3])
    assert not side.said(messages.TreeFeedback)  # nothing was looked at, nothing came
    score = side.pools[0].score
    assert (score.trees, score.nodes, score.verified, score.accepted) == (2, 6, 3, 1)


def test_nodes_that_others_guessed_are_not_named() -> None:
    side, request, message = served(messages.FEEDBACK)
    side.hear(tree(message, 0, 5, (1, 0, 7, -0.5)))
    mixed = Guesses.chain([7, 9, 11], [-0.1, -0.2, -0.3], "ngram")
    mixed.add(-1, 3, -0.5)
    side.drafter.verified([request], Forest.of([mixed]))
    side.commit(request, 7, 9, 11, 2)
    (feedback,) = side.said(messages.TreeFeedback)
    assert (feedback.verified, feedback.accepted) == ([1], [1])


def test_who_does_not_ask_gets_no_feedback() -> None:
    side, request, message = served()
    side.hear(tree(message, 0, 5, *NODES))
    step(side, request, [7, 9, 1])
    assert not side.said(messages.TreeFeedback) and side.said(messages.Commit)
    assert side.pools[0].score.verified == 0


# -- pauses


def test_a_request_that_waits_pauses_its_session() -> None:
    side, request, message = served(messages.PAUSES)
    own = message.session, message.generation
    side.drafter.pause(request)
    assert side.said(messages.Pause) == [messages.Pause(*own)] and not side.said(messages.Close)
    side.propose(request)
    assert side.said(messages.Resume) == [messages.Resume(*own)] and not side.said(messages.Open)
    side.propose(request)
    assert not side.said(messages.Resume)


def test_a_commit_ends_a_pause_too() -> None:
    side, request, message = served(messages.PAUSES)
    side.commit(request, 7)
    side.commit(request, 8)  # it rests: kept back
    side.said(messages.Commit)
    side.drafter.pause(request)
    side.propose(request)
    assert [m.tokens for m in side.said(messages.Commit)] == [[8]] and not side.said(messages.Resume)
    assert message.session in side.pools[0].sessions


def test_a_pool_that_knows_no_pauses_gets_close() -> None:
    side, request = Side(), make_request()
    side.opened(request)
    side.drafter.pause(request)
    assert side.said(messages.Close) and not side.said(messages.Pause) and not side.pools[0].sessions
    assert side.opened(request).generation == 2


def test_a_pool_without_room_gets_its_commits_later() -> None:
    side, request, message = served()
    side.hear(messages.Pause(message.session, message.generation))
    for token in (7, 8, 9):
        step(side, request, [token])
    assert not side.said(messages.Commit) and side.drops() == {"pauses": 1}
    side.hear(messages.Resume(message.session, message.generation))
    side.propose(request)
    (commit,) = side.said(messages.Commit)
    assert (commit.base_len, commit.tokens) == (5, [7, 8, 9]) and not side.said(messages.Open)


def test_a_tree_means_resume() -> None:
    side, request, message = served()
    side.hear(messages.Pause(message.session, message.generation))
    step(side, request, [7])
    side.hear(tree(message, 0, 5, *NODES))
    assert [len(found) for found in side.propose(request)] == [1]
    assert [m.tokens for m in side.said(messages.Commit)] == [[7]]


@pytest.mark.parametrize(("pools", "patience"), [(1, PARKED_ALONE), (2, PARKED)])
def test_nobody_waits_for_room_for_ever(pools: int, patience: float) -> None:
    side, request = Side(pools=pools), make_request()
    message = side.opened(request)
    side.hear(messages.Pause(message.session, message.generation))
    side.propose(request)
    assert not side.said(messages.Close)
    until = side.now + patience + 0.1
    while side.now < until:
        side.now += 0.25
        for pool in side.pools:
            side.hear(load(), pool.peer)
    side.propose(request)
    side.propose(request)
    assert len(side.said(messages.Close)) == 1
    assert side.said(messages.Open, b"%d" % (pools - 1))[0].generation == 2


# -- a pool that is busy


def test_a_pool_keeps_its_sessions_while_it_is_busy() -> None:
    """It reads a prompt for 3 s, and another pool is there: nobody takes its work away."""
    side, request = Side(pools=2), make_request()
    message = side.opened(request)
    side.hear(able(busy_ms=3000.0))
    for _ in range(29):
        side.now += 0.1
        side.hear(load(), b"1")
        side.drafter.tick()
        side.propose(request)
        step(side, request, [3])
    assert side.pools[0].ready and not side.said(messages.Close) and not side.said(messages.Open, b"1")
    side.hear(tree(message, 0, 5, (1, 0, 3, -0.1)))
    assert not side.said(messages.Open)


def test_new_sessions_go_to_one_that_is_not_busy() -> None:
    side = Side(pools=2)
    side.hear(able(busy_ms=3000.0))
    for number in range(3):
        side.propose(make_request(number))
    assert len(side.said(messages.Open, b"1")) == 3
    side.hear(load())  # it is not, after all
    side.propose(make_request(3))
    assert len(side.said(messages.Open)) == 1


@pytest.mark.parametrize("busy", [3000.0, 1e8])
def test_a_busy_pool_is_silent_in_the_end(busy: float) -> None:
    side = Side()
    side.hear(able(busy_ms=busy))
    quiet = min(busy / 1000, MAX_BUSY) + SILENCE
    side.let_pass(quiet - 0.01)
    assert side.pools[0].ready
    side.let_pass(0.02)
    assert side.pools[0].silent and not side.pools[0].ready


def test_progress_is_a_word() -> None:
    side, request = Side(pools=2), make_request()
    message = side.opened(request)
    for read in range(1, 40):
        side.now += 0.1
        side.hear(load(), b"1")
        side.hear(messages.Progress(message.session, message.generation, read))
        side.drafter.tick()
        side.propose(request)
    session = side.drafter.machine.session(request)
    assert session is not None and session.pool is side.pools[0]
    assert side.now > SILENCE + PATIENCE and not side.said(messages.Close)


# -- errors


@pytest.mark.parametrize(
    ("nodes", "code"),
    [
        ([(2, 0, 7, -0.5), (2, 0, 8, -0.5)], "ids"),
        ([(1, 0, VOCAB, -0.5)], "vocabulary"),
        ([(n, 0, n % VOCAB, -0.5) for n in range(1, 16000)], "room"),
    ],
)
def test_a_pool_is_told_which_rule_it_broke(nodes: list[tuple[int, int, int, float]], code: str) -> None:
    side, _, message = served(messages.ERRORS)
    side.hear(tree(message, 0, 5, *nodes))
    if code == "room":
        side.hear(tree(message, 1, 5, *((n + 16000, *rest) for n, *rest in nodes)))
    (error,) = side.said(Error)
    assert (error.code, error.about) == (code, "tree")
    assert (error.session, error.generation) == (message.session, message.generation)


def test_other_frames_of_no_use() -> None:
    side, _, message = served(messages.ERRORS)
    side.hear(tree(message, 0, 9, *NODES))
    side.hear(tree(message, 4, 5, *NODES))
    side.drafter.receive(Received(b"0", b"\xc1"))
    side.drafter.receive(Received(b"0", msgspec.msgpack.encode({"type": "tree", "session": "x"})))
    side.drafter.receive(Received(b"0", msgspec.msgpack.encode({"type": "greeting"})))
    told = [(error.code, error.about, error.count) for error in side.said(Error)]
    assert told[0][0] == "base_len" and ("malformed", "", 1) in told and ("unknown_type", "greeting", 1) in told
    side.now += PERIOD
    side.hear(able(messages.ERRORS))
    side.drafter.receive(Received(b"0", b"\xc1"))
    assert [(error.code, error.count) for error in side.said(Error)] == [("malformed", 2)]


def test_who_does_not_understand_errors_gets_none() -> None:
    side = Side()
    side.drafter.receive(Received(b"0", b"\xc1"))
    side.drafter.receive(Received(b"0", msgspec.msgpack.encode({"type": "greeting"})))
    assert not side.said(Error)
    assert side.drops() == {"malformed_frames": 1, "unknown_messages": 1} and side.pools[0].ready


# -- the greeting


def test_a_version_that_was_not_offered_is_no_answer() -> None:
    side = Side()
    side.hear(able(messages.ERRORS, version=7))
    assert not side.pools[0].ready and side.pools[0].refusal == "version 7 is not 1 to 1"


def test_hello_tells_of_the_targets_steps() -> None:
    side, request, message = served()
    side.hear(tree(message, 0, 5, *NODES))
    for _ in range(20):
        side.now += 0.05
        side.hear(load())
        step(side, request, [1])
    side.now += 1.0
    side.hear(load())
    side.drafter.tick()
    hello = side.said(messages.Hello)[-1]
    assert hello.step_ms == pytest.approx(50.0) and hello.depth == 2
    for _ in range(3):
        side.now += 1.1
        side.hear(load())
        side.drafter.tick()
    assert side.said(messages.Hello)[-1].depth == 0  # nothing was verified lately
    assert msgspec.structs.replace(hello, echo=None, step_ms=0.0, depth=0) == HELLO


def test_the_way_to_a_pool_is_measured() -> None:
    """Its clock shows another time, and it answers late."""
    side, pool = Side(), None
    for number in range(5):
        side.let_pass(1.1)
        (hello,) = side.said(messages.Hello)[-1:]
        assert hello.echo is not None
        side.now += 0.04 + 0.1 * number
        side.hear(able(echo=Echo(9_000_000_000 + number, hello.echo.sent, 10_000)))
        (pool,) = side.pools
        assert pool.echo.delay == pytest.approx(0.015)
