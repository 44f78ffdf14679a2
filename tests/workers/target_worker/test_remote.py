"""Remote drafts, seen from the target: whatever comes or does not, the step loop goes on."""

import hashlib
import logging

import msgspec
import numpy as np
import pytest
from side import NODES, VOCAB, Side, load, make_request, tree
from support import paths_of

from pilotfish.core.cache.prefix_keys import prefix_keys, text_root
from pilotfish.core.drafting.messages import CONNECTION, PREFIX_KEYS, Close, Commit, Open, Pause, Refuse, Resync
from pilotfish.core.drafting.pools import DRAFT_REASONS, MOST_OPENED, PERIOD, DraftPool
from pilotfish.core.drafting.target_machine import RESTING_NODES, RESTING_PERIOD
from pilotfish.core.peers.fields import Error, Notice
from pilotfish.core.peers.peer import FIRST_PAUSE, SILENCE, Drops
from pilotfish.core.scheduling.request import Request
from pilotfish.engine.pools.remote_pools import salt_key
from pilotfish.wire.channel import Received, encode
from pilotfish.wire.curve_keys import KeyPair

SALTS = ((0, None), (1, "a"), (2, "b"), (3, "a"))


@pytest.fixture
def side() -> Side:
    return Side()


def test_a_request_is_opened_when_it_is_proposed_for(side: Side) -> None:
    request = make_request(temperature=0.5, top_k=9, logit_bias={3: 1.0}, bad_token_ids=(6,), min_tokens=4)
    (empty,) = side.propose(request)
    (message,) = side.said(Open)
    assert len(empty) == 0
    assert (message.generation, message.tokens) == (1, request.tokens)
    assert (message.prompt_tokens, message.max_length) == (5, 505)
    assert (message.seed, message.wanted) == (3, 256)
    sampling = message.sampling
    assert (sampling.temperature, sampling.top_k, sampling.logit_bias, sampling.min_tokens) == (0.5, 9, {3: 1.0}, 4)
    assert (sampling.bad_token_ids, sampling.bad_sequences, sampling.stop_ids) == ([6], [[4, 5]], [2])
    side.propose(request)
    assert not side.said(Open)


def test_a_salt_is_told_as_a_digest() -> None:
    """Which only the target's key tells whose it is: equal for equal salts, else different; absent without a salt."""
    sides = [Side(salt_key=key) for key in (b"one", b"two", b"one")]
    digests = [[side.opened(make_request(number, salt=salt)).salt for number, salt in SALTS] for side in sides]
    assert digests[0] == digests[2] and digests[0][0] is None
    first, second, again = digests[0][1:]
    assert first == again and len({first, second, *digests[1][1:3]}) == 4
    frame = encode(sides[0].opened(make_request(9, salt="a tenant's secret")))
    assert b"secret" not in frame and hashlib.sha256(b"a tenant's secret").digest()[:16] not in frame


def test_targets_that_hold_one_key_have_the_key_of_salts_in_common() -> None:
    one, two = KeyPair("p" * 40, "s" * 40), KeyPair("q" * 40, "t" * 40)
    keys = [salt_key(own) for own in (one, two, one)]
    assert keys[0] == keys[2] != keys[1] and b"s" * 40 not in keys[0]
    assert len({salt_key(None) for _ in range(3)} | set(keys)) == 5


def test_what_a_pool_was_told_is_named_by_its_key(side: Side) -> None:
    """From an Open on, and what was committed once the session has ended; all of it after a Resync."""
    side.hear(load(capabilities=[PREFIX_KEYS]))
    first = make_request(0, prompt=100)
    assert side.opened(first).prefix_key is None
    side.commit(first, *range(10, 70))
    side.drafter.close(first)
    (named,), tokens = prefix_keys(text_root(None), first.tokens)[1:], [*first.tokens, 7]
    second = Request(1, tokens, first.params, 3, frozenset(), 10_000)
    message = side.opened(second)
    assert (message.prefix_key, message.tokens, message.prompt_tokens) == (named, tokens[128:], 161)
    other = side.opened(Request(2, tokens, first.params, 3, frozenset(), 10_000, cache_salt="a"))
    assert other.prefix_key is None and other.tokens == tokens
    side.hear(Resync(message.session, 1, "nothing is known by its prefix_key"))
    again = side.opened(second)
    assert (again.generation, again.prefix_key, again.tokens) == (2, None, tokens)


def test_what_was_kept_back_until_the_end_is_not_named(side: Side) -> None:
    side.hear(load(capabilities=[PREFIX_KEYS]))
    first = make_request(0, prompt=100)
    side.opened(first)
    side.commit(first, 10)
    side.commit(first, *range(11, 60))  # it rests: this is not sent
    assert [len(commit.tokens) for commit in side.said(Commit)] == [1]
    side.drafter.close(first)
    message = side.opened(Request(1, [*first.tokens, 7], first.params, 3, frozenset(), 10_000))
    assert message.prefix_key == prefix_keys(text_root(None), first.tokens[:64])[0]
    assert message.tokens == [*first.tokens[64:], 7]


@pytest.mark.parametrize("loss", ["silent", "disconnected", "never said so"])
def test_a_pool_that_may_have_forgotten_is_sent_all_tokens(side: Side, loss: str) -> None:
    side.hear(load(capabilities=[PREFIX_KEYS] if loss != "never said so" else []))
    side.opened(make_request(0, prompt=100))
    if loss == "silent":
        side.let_pass(SILENCE + 0.1)
    elif loss == "disconnected":
        side.problems[b"0"] = "it hung up"
        side.drafter.tick()
        side.problems.clear()
    side.hear(load(capabilities=[PREFIX_KEYS] if loss != "never said so" else []))
    message = side.opened(make_request(1, prompt=100))
    assert message.prefix_key is None and len(message.tokens) == 100
    named = side.opened(make_request(2, prompt=100))
    assert (named.prefix_key is None) == (loss == "never said so")


def test_what_is_pushed_is_proposed_and_re_rooted(side: Side) -> None:
    request = make_request()
    message = side.opened(request)
    side.hear(tree(message, 0, 5, *NODES))
    (proposed,) = side.propose(request)
    assert paths_of(proposed) == {(7,): -0.5, (8,): -1.0, (7, 9): -0.75}
    assert side.commit(request, 7)
    (commit,) = side.said(Commit)
    assert (commit.session, commit.generation, commit.base_len, commit.tokens, commit.wanted) == (1, 1, 5, [7], 256)
    (proposed,) = side.propose(request)
    assert proposed.tokens.tolist() == [9]
    side.hear(tree(message, 1, 5, (4, 3, 11, -0.1), (5, 2, 12, -0.1)))  # on its way meanwhile
    (proposed,) = side.propose(request)
    assert proposed.tokens.tolist() == [9, 11]
    assert side.pools[0].score.trees == 2 and side.drops() == {"late_nodes": 1}


def test_a_draft_that_does_not_pay_is_told_to_rest(side: Side) -> None:
    request = make_request()
    side.opened(request)
    side.commit(request, 1)  # for which it was asked
    side.commit(request, 2)
    side.commit(request, 3)
    assert [(c.tokens, c.wanted) for c in side.said(Commit)] == [([1], 256)]
    side.now += RESTING_PERIOD
    side.commit(request, 4)
    assert [(c.base_len, c.tokens, c.wanted) for c in side.said(Commit)] == [(6, [2, 3, 4], RESTING_NODES)]
    side.commit(request, 5)
    side.propose(request)  # what it was not told comes at once
    assert [(c.base_len, c.tokens, c.wanted) for c in side.said(Commit)] == [(9, [5], 256)]


def test_a_pool_that_asks_again_and_again_waits_longer_and_longer(side: Side) -> None:
    """Or it could have whole sequences sent step after step."""
    request = make_request()
    times = []
    for _ in range(3000):
        side.hear(load())
        side.propose(request)
        for message in side.said(Open):
            times.append(side.now)
            side.hear(Resync(message.session, message.generation, "again"))
        side.now += 0.01
    assert len(times) <= 8 and times[1] < 0.1
    gaps = np.diff(times)[2:]
    assert (gaps[1:] > 1.5 * gaps[:-1]).all()


def test_one_that_served_for_a_while_is_opened_at_once_and_not_too_often(side: Side) -> None:
    request, times = make_request(), []
    for _ in range(500):
        side.hear(load())
        side.propose(request)
        for message in side.said(Open):
            times.append(side.now)
            side.now += 1.5
            side.hear(load())
            side.hear(Resync(message.session, message.generation, "lost"))
        side.now += 0.5
    assert times[:MOST_OPENED] == [2.0 * n for n in range(MOST_OPENED)]
    assert all(sum(at <= other < at + PERIOD for other in times) == MOST_OPENED for at in times[:-MOST_OPENED])


def test_a_breach_pauses_the_session(side: Side) -> None:
    request, other = make_request(0), make_request(1)
    message, fine = side.opened(request), side.opened(other)
    side.hear(tree(message, 0, 5, (1, 0, VOCAB, -0.1), (2, 0, 3, -0.1)))
    assert [(c.session, c.generation) for c in side.said(Close)] == [(message.session, 1)]
    side.hear(tree(fine, 0, 5, *NODES))
    assert [len(t) for t in side.propose(request, other)] == [0, 3] and not side.said(Open)
    side.now += 1.1
    side.hear(load())
    side.propose(request, other)
    (again,) = side.said(Open)
    side.hear(tree(again, 0, 5, *NODES))
    assert again.generation == 2 and len(side.propose(request)[0]) == 3  # it is forgiven
    assert side.drops() == {"dropped_nodes": 1}


def test_frames_of_sessions_that_are_not_the_pools() -> None:
    side = Side(pools=2)
    request = make_request()
    message = side.opened(request)
    foreign = [tree(message, 0, 5, *NODES), Resync(message.session, 1, "mine"), Refuse(message.session, 1, "mine")]
    for frame in foreign:
        side.hear(frame, b"1")
    unknown = msgspec.structs.replace(tree(message, 0, 5, *NODES), session=77)
    for frame in (Resync(77, 1, "none"), unknown, Resync(message.session, 9, "x")):
        side.hear(frame)
    side.hear(load(), b"nobody")
    assert (side.drops(0), side.drops(1)) == ({"stale_frames": 3}, {"stale_frames": 3})
    assert len(side.propose(request)[0]) == 0 and not side.said(Open) and not side.said(Close)


def test_a_session_that_is_refused_goes_elsewhere_first() -> None:
    side = Side(pools=2)
    request = make_request()
    message = side.opened(request, b"0")
    side.hear(Refuse(message.session, message.generation, "context"), b"0")
    again = side.opened(request, b"1")
    side.hear(Refuse(again.session, again.generation, "context"), b"1")
    side.propose(request)
    assert not side.said(Open, b"0") and not side.said(Open, b"1")  # nobody wants it: it waits
    side.now += 2.1
    for pool in (b"0", b"1"):
        side.hear(load(), pool)
    side.propose(request)
    assert len(side.said(Open, b"0") + side.said(Open, b"1")) == 1


def test_sessions_spread_by_load() -> None:
    side = Side(pools=3)
    side.hear(load(sessions=4), b"1")
    side.propose(*[make_request(number) for number in range(8)])
    assert [len(pool.sessions) for pool in side.pools] == [4, 0, 4]
    side.propose(*[make_request(number) for number in range(11)])
    assert sorted(len(pool.sessions) for pool in side.pools) == [1, 5, 5]


# -- what is dropped is counted by reason, and said once, then now and then


def test_each_reason_is_counted_for_its_pool() -> None:
    side, request = Side(pools=2), make_request()

    def reopened() -> Open:
        side.now += 20.0
        side.hear(load())
        side.hear(load(), b"1")
        return side.opened(request)

    def push(message: Open, sequence: int, *nodes: tuple[int, int, int, float]) -> None:
        side.hear(tree(message, sequence, len(request.tokens), *nodes))

    side.pools[1].refused("busy", side.now)  # so that all sessions are the first's
    side.pools[1]._left_alone_until = 1e9
    message = reopened()
    push(message, 0, *NODES)
    push(message, 0, *NODES)  # stale
    push(message, 1, (4, 0, 7, -0.5), (5, 99, 8, -0.5))  # repeated, late
    push(message, 2, (6, 0, VOCAB, -0.5))  # against the protocol
    message = reopened()
    push(message, 1, *NODES)  # a gap
    message = reopened()
    side.hear(Resync(message.session, message.generation, "lost"))
    message = reopened()
    side.hear(Refuse(message.session, message.generation, "too long"))
    side.hear(Refuse(CONNECTION, 0, "not you"))
    side.drafter.receive(Received(b"0", b"\xc1"))
    side.drafter.receive(Received(b"0", msgspec.msgpack.encode({"type": "greeting"})))
    side.hear(Error("malformed", "open", "what is this"))
    message = reopened()
    side.hear(Pause(message.session, message.generation))
    assert side.drops() == {**dict.fromkeys(DRAFT_REASONS, 1), "refusals": 2}
    assert side.drops(1) == {"refusals": 1}


def test_the_first_of_a_reason_is_logged_and_then_how_many_more() -> None:
    notices: list[Notice] = []
    drops = Drops("pool 0", notices, DRAFT_REASONS, DraftPool.FAULTS)
    for second in range(1000):
        drops.add("malformed_frames", 2, float(second), "no map")
        drops.add("late_nodes", 1, float(second))
        drops.add("gaps", 0, float(second))
    faults = [n.text for n in notices if n.level == logging.WARNING]
    assert faults[0] == "pool 0: frames that are no message: 2 (no map)"
    assert faults[1] == f"pool 0: frames that are no message: 120 in {FIRST_PAUSE:.0f} s (no map)"
    normal = [n.text for n in notices if n.level == logging.INFO]
    assert len(faults) == len(normal) == 5  # after 60, 120, 240, 480 s more
    assert drops.counts["malformed_frames"] == 2000 and drops.occurred.keys() == {"malformed_frames", "late_nodes"}


@pytest.mark.parametrize(
    ("nodes", "base_len", "said"),
    [
        (((2, 0, 7, -1.0), (1, 0, 8, -1.0)), 5, "ids do not rise"),
        (((1, 0, 7, -1.0),), 9, "base_len 9 is not 5 to 5"),
        (((1, 0, VOCAB, -1.0),), 5, "a token that is not in the vocabulary"),
    ],
)
def test_the_log_says_how_nodes_broke_the_protocol(
    nodes: tuple[tuple[int, int, int, float], ...], base_len: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    side, request = Side(), make_request()
    message = side.opened(request)
    with caplog.at_level(logging.WARNING):
        side.hear(tree(message, 0, base_len, *nodes))
    assert [r.message for r in caplog.records] == [f"pool 0: nodes against the protocol: {len(nodes)} ({said})"]
