"""Remote drafts, seen from the target: whatever comes or does not, the step loop goes on."""

from __future__ import annotations

import hashlib
import threading

import msgspec
import numpy as np
import pytest
from side import LIMITS, NODES, VOCAB, Side, load, make_request, tree
from support import limits, paths_of

from pilotfish.core.cache.prefix_keys import prefix_keys, text_root
from pilotfish.core.drafting.messages import CONNECTION, PREFIX_KEYS, Close, Commit, Open, Refuse, Resync
from pilotfish.core.drafting.pools import MAX_FAULTS, MOST_OPENED, PAUSE, PERIOD
from pilotfish.core.drafting.target_machine import RESTING_NODES, RESTING_PERIOD
from pilotfish.core.peers.fields import Peer
from pilotfish.core.peers.peer import SILENCE
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


def test_a_request_that_waits_for_its_kv_is_opened_and_can_be_guessed_for(side: Side) -> None:
    request = make_request()
    side.drafter.expect([request])
    (message,) = side.said(Open)
    assert message.tokens == request.tokens
    side.hear(tree(message, 0, 5, *NODES))
    (proposed,) = side.propose(request)
    assert paths_of(proposed) == {(7,): -0.5, (8,): -1.0, (7, 9): -0.75} and not side.said(Open)
    side.drafter.close(request)
    assert side.said(Close)


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
        side.now += SILENCE + 0.1
        side.drafter.tick()
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
    side.commit(request, 7)
    (commit,) = side.said(Commit)
    assert (commit.session, commit.generation, commit.base_len, commit.tokens, commit.wanted) == (1, 1, 5, [7], 256)
    (proposed,) = side.propose(request)
    assert proposed.tokens.tolist() == [9]
    side.hear(tree(message, 1, 5, (4, 3, 11, -0.1), (5, 2, 12, -0.1)))  # on its way meanwhile
    (proposed,) = side.propose(request)
    assert proposed.tokens.tolist() == [9, 11]
    counts = side.drafter.machine.counts
    assert (counts.hits, counts.misses, counts.trees) == (1, 0, 2)
    assert side.drops() == {"late_nodes": 1}


def test_a_miss_leaves_nothing_to_verify(side: Side) -> None:
    request = make_request()
    side.hear(tree(side.opened(request), 0, 5, *NODES))
    side.commit(request, 50)
    assert len(side.propose(request)[0]) == 0 and side.drafter.machine.counts.misses == 1


def test_no_more_is_proposed_than_may_be_verified(side: Side) -> None:
    request = make_request()
    side.hear(tree(side.opened(request), 0, 5, *((n, 0, n, -0.1 * n) for n in range(1, 30))))
    assert len(side.propose(request)[0]) == LIMITS.nodes
    assert len(side.drafter.propose([request], limits(nodes=0))[0]) == 0


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


def test_a_push_that_comes_twice_counts_once(side: Side) -> None:
    request = make_request()
    push = tree(side.opened(request), 0, 5, *NODES)
    side.hear(push)
    side.hear(push)
    assert side.drops() == {"stale_frames": 1}
    assert len(side.propose(request)[0]) == 3 and not side.said(Open)


def test_a_gap_opens_the_session_anew_with_the_same_pool(side: Side) -> None:
    """No Close goes out: the draft keeps what KV it can use."""
    request = make_request()
    first = side.opened(request)
    side.hear(tree(first, 1, 5, *NODES))
    side.hear(tree(first, 2, 5, (9, 0, 1, -0.1)))
    side.commit(request, 7)
    assert not side.said(Commit) and not side.said(Close)
    again = side.opened(request)
    assert (again.session, again.generation, again.tokens) == (first.session, 2, request.tokens)
    side.hear(tree(first, 0, 5, *NODES))  # of the older generation
    assert len(side.propose(request)[0]) == 0
    side.hear(tree(again, 0, 6, *NODES))
    assert len(side.propose(request)[0]) == 3


def test_a_resync_opens_anew(side: Side) -> None:
    request = make_request()
    first = side.opened(request)
    side.hear(Resync(first.session, first.generation, "base_len"))
    again = side.opened(request)
    assert again.generation == 2
    side.hear(Resync(first.session, first.generation, "base_len"))  # late
    side.propose(request)
    assert not side.said(Open)


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
    assert [m.generation for m in side.said(Open)] == [2]
    assert side.drops() == {"dropped_nodes": 1}


def test_frames_of_sessions_that_are_not_the_pools() -> None:
    side = Side(pools=2)
    request = make_request()
    message = side.opened(request)
    foreign = [
        tree(message, 0, 5, *NODES),
        Resync(message.session, 1, "mine"),
        Refuse(message.session, 1, "mine"),
    ]
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


def test_silence_moves_sessions_and_a_pool_that_comes_back_gets_new_ones() -> None:
    side = Side(pools=2)
    requests = [make_request(number) for number in range(4)]
    side.propose(*requests)
    first = side.said(Open, b"0")
    assert len(first) == len(side.said(Open, b"1")) == 2
    side.now += 0.9 * SILENCE
    side.hear(load(2, 2), b"1")
    side.now += 0.2 * SILENCE
    side.drafter.tick()
    assert [pool.ready for pool in side.pools] == [False, True]
    side.propose(*requests)
    moved = side.said(Open, b"1")
    assert [(m.session, m.generation) for m in moved] == [(m.session, 2) for m in first]
    assert side.drafter.machine.counts.moved == 2 and not side.pools[0].sessions
    side.hear(tree(first[0], 0, 5, *NODES), b"0")  # it lives, but those are gone
    side.hear(load(), b"0")
    side.propose(*requests, make_request(9))
    assert len(side.said(Open, b"0")) == 1 and len(side.pools[1].sessions) == 4


def test_without_a_pool_there_are_no_guesses() -> None:
    side = Side()
    request = make_request()
    side.hear(Refuse(CONNECTION, 0, "another tokenizer"))
    assert len(side.propose(request)[0]) == 0
    side.commit(request, 1)
    side.drafter.close(request)
    assert not side.said(Open) and not side.said(Commit) and not side.said(Close)


def test_sessions_spread_by_load() -> None:
    side = Side(pools=3)
    side.hear(load(sessions=4), b"1")
    side.propose(*[make_request(number) for number in range(8)])
    assert [len(pool.sessions) for pool in side.pools] == [4, 0, 4]
    side.propose(*[make_request(number) for number in range(11)])
    assert sorted(len(pool.sessions) for pool in side.pools) == [1, 5, 5]


def test_closing_frees_both_sides(side: Side) -> None:
    requests = [make_request(number) for number in range(3)]
    side.propose(*requests)
    assert [m.session for m in side.said(Open)] == [1, 2, 3]
    for request in requests:
        side.drafter.close(request)
        side.drafter.close(request)
    assert sorted(c.session for c in side.said(Close)) == [1, 2, 3]
    assert not side.pools[0].sessions and not side.drafter.machine._by_request and not side.drafter.machine.sessions
    side.commit(requests[0], 1)
    assert not side.said(Commit)
    side.propose(requests[0])
    assert [m.session for m in side.said(Open)] == [4]  # after a preemption


def test_a_lost_session_is_closed_too(side: Side) -> None:
    request = make_request()
    side.hear(tree(side.opened(request), 5, 5, *NODES))
    side.drafter.close(request)
    assert len(side.said(Close)) == 1 and not side.pools[0].sessions


def test_malformed_frames_have_a_pool_left_alone(side: Side) -> None:
    request = make_request()
    side.opened(request)
    for _ in range(MAX_FAULTS):
        side.drafter.receive(Received(b"0", b"\xc1"))
    assert side.drops() == {"malformed_frames": MAX_FAULTS}
    side.hear(load())
    side.propose(request)
    assert side.said(Close) and not side.said(Open)
    side.now += PAUSE
    side.hear(load())
    side.propose(request)
    assert side.said(Open)


def test_the_courier_and_the_step_loop_at_once() -> None:
    """Frames arrive on one thread while another proposes and commits."""
    side = Side()
    request = make_request(max_tokens=5000)
    message = side.opened(request)
    stopped = threading.Event()

    def deliver() -> None:
        sequence = 0
        while not stopped.is_set():
            session = side.drafter.machine.sessions[message.session]
            node = 10 * sequence + 1
            side.hear(tree(message, session.pushes, len(session.request.tokens) - 1, (node, 0, 7, -0.5)))
            sequence += 1

    thread = threading.Thread(target=deliver)
    thread.start()
    for _ in range(300):
        side.propose(request)
        side.commit(request, 7)
    stopped.set()
    thread.join()
    assert len(request.tokens) == 305 and side.drafter.machine.counts.hits + side.drafter.machine.counts.misses == 300


def test_random_messages_never_raise_and_trees_stay_verifiable() -> None:
    """Right, wrong, late and damaged frames from three pools at once, while requests come, commit and go."""
    side, rng = Side(pools=3, quarantine=0.05), np.random.default_rng(0)
    requests: dict[int, Request] = {}
    known: dict[int, tuple[Peer, Open]] = {}
    served = 0
    for step in range(1500):
        side.now += float(rng.exponential(0.01))
        side.drafter.tick()
        if rng.random() < 0.1:
            requests[step] = make_request(step)
        for pool in side.pools:
            if rng.random() < 0.3:
                side.hear(load(int(rng.integers(10)), int(rng.integers(10))), pool.peer)
            known |= {m.session: (pool.peer, m) for m in side.said(Open, pool.peer)}
        for peer, message in list(known.values())[-12:]:
            damage = rng.random()
            nodes = [
                (int(i), int(rng.integers(0, i)), int(rng.integers(VOCAB + (damage < 0.05))), -float(rng.random()))
                for i in range(1 + 10 * step, 1 + 10 * step + int(rng.integers(0, 9)))
            ]
            nodes = [(i, p if p > 10 * step else 0, t, s) for i, p, t, s in nodes]
            session = side.drafter.machine.sessions.get(message.session)
            frame = encode(
                tree(message, session.pushes if session else 0, len(session.request.tokens) if session else 5, *nodes)
            )
            if damage > 0.95:
                frame = bytes(b ^ (rng.random() < 0.02) for b in frame)
            elif damage > 0.93:
                frame = encode(Resync(message.session, message.generation, "x"))
            elif damage > 0.92:
                frame = encode(Refuse(int(rng.choice([0, message.session])), message.generation, "x"))
            side.drafter.receive(Received(peer if damage > 0.1 else b"2", frame))
        asked = [r for r in requests.values() if rng.random() < 0.7]
        for request, proposed in zip(asked, side.propose(*asked), strict=True):
            served += len(proposed) > 0
            assert all(0 <= token < VOCAB for token in proposed.tokens)
            assert all(score <= 0 for score in proposed.scores) and len(proposed) <= LIMITS.nodes
            node = int(rng.integers(len(proposed) + 1)) - 1
            side.commit(request, *proposed.path_tokens(node), int(rng.integers(VOCAB)))
            if request.finish_reason or rng.random() < 0.1:
                side.drafter.close(request)
                del requests[request.id]
    assert served > 200 and side.drafter.machine.counts.moved
    reasons = ("dropped_nodes", "malformed_frames", "stale_frames", "resyncs", "refusals")
    assert all(any(pool.drops.counts[reason] for pool in side.pools) for reason in reasons)
    for request in requests.values():
        side.drafter.close(request)
    assert not any(pool.sessions for pool in side.pools) and not side.drafter.machine.sessions
