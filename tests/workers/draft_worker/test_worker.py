"""The draft worker: it grows what its model says, whatever was committed, evicted or lost, and nobody harms others."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import loopback
import msgspec
import numpy as np
import pytest
from loopback import Loopback
from rig import HELLO, IDENTITY, SAMPLINGS, SMALL, Rig, Told, make_open, prompt
from support import CONTEXT, VOCAB, edit_tensors, tree_of, write_model

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS, KnownPrefixes, prefix_keys, text_root
from pilotfish.core.drafting import draft_machine, draft_sessions
from pilotfish.core.drafting.draft_sessions import FORGOTTEN, IDLE, LevelPart, SessionKey
from pilotfish.core.drafting.level_choice import WHOLE_CHUNK, LevelShape
from pilotfish.core.drafting.messages import (
    CONNECTION,
    MAX_NODES,
    PREFIX_KEYS,
    Close,
    Commit,
    Hello,
    Load,
    Open,
    Refuse,
    RequestSampling,
    Resync,
    Tree,
)
from pilotfish.core.peers import peer as peers
from pilotfish.core.sampling.constraint import MAX_LENGTH, Constraint
from pilotfish.core.trees.lookahead import NewNodes
from pilotfish.errors import ParameterError
from pilotfish.wire.channel import Received, decode_to_target, encode
from pilotfish.workers import draft as worker

TARGET = b"target"


def greeted(model: Path, *shape: LevelShape, **options: Any) -> Rig:
    """By `TARGET`."""
    rig = Rig(model, *shape, **options)
    rig.say(TARGET, HELLO)
    return rig


# -- greetings


def test_a_hello_is_answered_with_the_load(rig: Rig) -> None:
    rig.turns()
    (load,) = {encode(load): load for load in rig.heard(TARGET, Load)}.values()
    assert (load.model, load.sessions, load.free_slots) == (IDENTITY.model, 0, 2000)


@pytest.mark.parametrize(
    ("hello", "reason"),
    [
        (msgspec.structs.replace(HELLO, oldest=2, version=3), "version 2 to 3"),
        (msgspec.structs.replace(HELLO, tokenizer="another"), "tokenizer"),
        (
            msgspec.structs.replace(HELLO, added_tokens={VOCAB: "<other>"}),
            "token '<more>' has no id in the target and id",
        ),
    ],
    ids=["version", "tokenizer", "added tokens"],
)
def test_other_targets_are_refused(llama: Path, hello: Hello, reason: str) -> None:
    rig = Rig(llama, added_tokens={VOCAB: "<more>"})
    rig.say(TARGET, hello, make_open(prompt(8)))
    rig.turns()
    first, second = rig.heard(TARGET, Refuse)
    assert first.session == second.session == CONNECTION and reason in first.reason and "Hello" in second.reason
    assert not rig.heard(TARGET, Load) and len(rig.table) == 0


def test_a_larger_vocabulary_is_only_padding(llama: Path) -> None:
    rig = Rig(llama)
    rig.say(TARGET, msgspec.structs.replace(HELLO, vocab_size=VOCAB + 64))
    rig.turns()
    assert rig.heard(TARGET, Load)


#: Of a draft that guesses nothing but the last of its tokens.
WIDE = VOCAB + 64


@pytest.fixture(scope="module")
def stubborn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft with three more tokens, which are always among its guesses."""
    copy = write_model(tmp_path_factory.mktemp("stubborn"), "llama", vocab_size=WIDE)
    return edit_tensors(copy, lambda tensors: tensors["lm_head.weight"][VOCAB : VOCAB + 3].mul_(3.0))


@pytest.mark.parametrize(
    ("told", "known"),
    [
        ({"vocab_size": VOCAB}, set()),
        ({"vocab_size": VOCAB + 1, "added_tokens": {VOCAB: "<a>"}}, {VOCAB}),
        ({"vocab_size": WIDE, "added_tokens": {VOCAB: "<a>", VOCAB + 2: "<c>"}}, {VOCAB, VOCAB + 2}),
        ({"vocab_size": WIDE, "added_tokens": {VOCAB + 3: "<d>"}}, set()),
    ],
)
def test_tokens_that_the_target_lacks_are_never_guessed(stubborn: Path, told: dict[str, Any], known: set[int]) -> None:
    rig = Rig(
        stubborn, LevelShape(leaves=4, children=8), added_tokens={VOCAB: "<a>", VOCAB + 1: "<b>", VOCAB + 2: "<c>"}
    )
    rig.say(
        TARGET, msgspec.structs.replace(HELLO, **told), make_open(prompt(8), sampling=RequestSampling(temperature=2.0))
    )
    rig.rest()
    guessed = {token for tree in rig.trees(TARGET, 1) for token in tree.tokens}
    assert guessed and {token for token in guessed if token >= VOCAB} <= known
    assert known <= guessed and max(guessed) < told["vocab_size"]


@pytest.mark.parametrize("place", ["opened", "committed"])
def test_a_token_that_only_the_target_has_is_read_as_another(llama: Path, place: str) -> None:
    """The draft has no embedding for it, and guesses on."""
    rig = Rig(llama)
    rig.say(TARGET, msgspec.structs.replace(HELLO, vocab_size=VOCAB + 9, added_tokens={VOCAB: "<a>"}))
    tokens, sampling = prompt(8), RequestSampling(temperature=0.7, repetition_penalty=1.2)
    rig.say(TARGET, make_open([*tokens, *([VOCAB + 8] if place == "opened" else [])], sampling=sampling))
    rig.rest()
    if place == "committed":
        rig.trees(TARGET, 1)
        rig.say(TARGET, Commit(1, 1, 8, [VOCAB + 8], 60))
        rig.rest()
    assert rig.session().num_pending == 0 and sum(len(tree.ids) for tree in rig.trees(TARGET, 1)) > 10
    assert not rig.heard(TARGET, Refuse) and not rig.heard(TARGET, Resync)


@pytest.mark.parametrize("place", ["opened", "committed"])
def test_a_token_beyond_what_the_target_said_ends_its_session_alone(rig: Rig, place: str) -> None:
    rig.say(TARGET, make_open(prompt(8), session=2))
    one = Told(rig, make_open([*prompt(8), *([VOCAB + 1] if place == "opened" else [])]))
    if place == "committed":
        rig.rest()
        one.commit([VOCAB + 1])
    rig.rest()
    assert [session.key.number for session in rig.table] == [2] and rig.trees(TARGET, 2)
    assert rig.heard(TARGET, Refuse if place == "opened" else Resync)


@pytest.mark.parametrize(
    "message", [make_open([1]), Commit(1, 1, 1, [1], 1), Close(1, 1)], ids=["open", "commit", "close"]
)
def test_nothing_is_done_before_a_hello(llama: Path, message: Open | Commit | Close) -> None:
    rig = Rig(llama)
    rig.say(TARGET, message)
    rig.turns()
    (refusal,) = rig.heard(TARGET, Refuse)
    assert (refusal.session, refusal.reason) == (CONNECTION, "no Hello came before")


def test_it_serves_over_a_loopback(llama: Path) -> None:
    """On a thread of its own, until it is stopped."""
    here, there = Loopback.pair(TARGET)
    rig = Rig(llama)
    rig.worker.channel = there
    thread = threading.Thread(target=rig.worker.run)
    thread.start()
    for message in (HELLO, make_open(prompt(8))):
        here.send(b"0", encode(message))
    kinds: set[type] = set()
    while Tree not in kinds:
        kinds |= {type(decode_to_target(received.frame)) for received in here.receive(1.0)}
    rig.worker.stop()
    thread.join()
    assert Load in kinds


# -- growth


@pytest.mark.parametrize("name", SAMPLINGS)
def test_trees_are_what_the_model_says(rig: Rig, name: str) -> None:
    told = Told(rig, make_open(prompt(20), sampling=SAMPLINGS[name], wanted=1000))
    rig.turns(8)
    assert len(told.listen()) == 8
    deepest = max(len(path) for path in told.guesses())
    assert deepest >= 3


@pytest.mark.parametrize("name", SAMPLINGS)
def test_kept_kv_changes_no_guess(rig: Rig, name: str) -> None:
    """Hits, parts of hits, misses, tokens after a node that was not expanded: every later level is what a forward
    over the whole sequence gives."""
    rng = np.random.default_rng(sum(map(ord, name)))
    told = Told(rig, make_open(prompt(10), sampling=SAMPLINGS[name]))
    seen = set()
    for step in range(12):
        rig.turns(int(rng.integers(1, 5)))
        told.listen()
        paths = sorted(told.guesses(), key=len)
        path = paths[-1 if step % 2 else int(rng.integers(len(paths)))]  # the deepest is never expanded
        kind = ("whole", "miss", "after", "alone")[step % 4]
        extra = [int(t) for t in rng.integers(0, VOCAB, 2)]
        told.commit({"whole": path, "miss": [*path[:-1], *extra], "after": [*path, extra[0]], "alone": extra[:1]}[kind])
        seen.add((kind, len(path) > 1))
    rig.turns(3)
    assert told.listen()
    assert rig.session().tokens == told.tokens
    assert (
        len(seen) >= 4
        and rig.worker.machine.counts.hits
        and rig.worker.machine.counts.misses
        and rig.worker.machine.counts.used
    )


def test_accepted_nodes_keep_their_kv(rig: Rig) -> None:
    told = Told(rig, make_open(prompt(10), sampling=SAMPLINGS["greedy"]))
    rig.turns(8)
    told.listen()
    session = rig.session()
    deepest = max(session.tree.expanded, key=session.tree.depth)
    path, slots = session.tree.path_tokens(deepest), session.tree.path(deepest)
    told.commit(path)
    rows = rig.worker.machine.counts.rows
    rig.turns()
    assert session.slots[10:].tolist() == slots and len(slots) >= 2
    assert rig.worker.machine.counts.rows - rows <= SMALL.leaves  # nothing was computed again
    told.listen()


def test_a_prompt_goes_in_chunks(rig: Rig) -> None:
    told = Told(rig, make_open(prompt(2 * WHOLE_CHUNK + 10)))
    rig.turns(2)
    assert not told.listen() and len(rig.session().slots) == 2 * WHOLE_CHUNK
    rig.turns(2)
    assert told.listen()


def test_commits_while_a_prompt_is_read(rig: Rig) -> None:
    told = Told(rig, make_open(prompt(WHOLE_CHUNK + 10)))
    rig.turns()
    told.commit([5, 6])
    rig.turns(3)
    assert told.listen()


def test_company_changes_no_guess(llama: Path) -> None:
    """Sessions of several targets and tenants, prompts among leaves, each level checked."""
    rig = Rig(llama, LevelShape(leaves=12, children=3))
    told = []
    for number in range(6):
        peer = (b"one", b"two", b"three")[number % 3]
        rig.say(peer, HELLO, tenant=peer.decode(), weight=1.0 + number % 3)
        sampling = list(SAMPLINGS.values())[number % len(SAMPLINGS)]
        told.append(Told(rig, make_open(prompt(3 + 60 * number, number), 1 + number // 3, sampling=sampling), peer))
        rig.turns(2)
    for turn in range(6):
        rig.turns(3)
        for number, one in enumerate(told):
            one.listen()
            if (turn + number) % 3 == 0 and (paths := one.guesses()):
                one.commit(paths[-1])
    for one in told:
        one.close()
    rig.turns()
    assert len(rig.table) == 0 and rig.table.pool.num_available == rig.table.pool.capacity


def test_it_stops_at_the_wanted_nodes(rig: Rig) -> None:
    told = Told(rig, make_open(prompt(10), wanted=30))
    rig.rest()
    level = SMALL.leaves * SMALL.children
    assert 30 <= len(rig.session().tree) < 30 + level
    told.listen()
    told.commit(told.guesses()[0], wanted=0)
    rig.rest()
    assert 0 < len(rig.session().tree) < 30 and not told.listen()
    told.commit([3], wanted=40)
    rig.rest()
    assert len(rig.session().tree) >= 40


def test_no_node_beyond_the_last_token(rig: Rig) -> None:
    """The last token of all is drawn by the target after the deepest node."""
    told = Told(rig, make_open(prompt(10), max_length=13, wanted=5000))
    rig.rest()
    told.listen()
    assert max(len(path) for path in told.guesses()) == 2
    told.commit([1, 2])
    rig.rest()
    told.listen()
    assert not told.guesses()


def test_the_context_ends_every_tree(llama: Path) -> None:
    """A target's sequence may be longer than what the draft can hold: it is told so when that is reached."""
    rig = greeted(llama, slots=CONTEXT + 100)
    told = Told(rig, make_open(prompt(CONTEXT - 4), max_length=10**6, wanted=5000))
    rig.rest()
    assert tree_of(rig.session().tree).depths.max() == 3
    told.commit([1] * 5)
    rig.turns()
    (refusal,) = rig.heard(TARGET, Refuse)
    assert refusal.session == 1 and str(CONTEXT) in refusal.reason
    assert len(rig.table) == 0 and rig.table.pool.num_available == rig.table.pool.capacity


# -- what is lost, doubled, late


def test_a_gap_asks_for_the_sequence_and_frees_its_slots(rig: Rig) -> None:
    told = Told(rig, make_open(prompt(10)))
    rig.turns(4)
    rig.say(TARGET, Commit(1, 1, 12, [5], 10))
    rig.turns()
    (resync,) = rig.heard(TARGET, Resync)
    assert (resync.session, resync.generation) == (1, 1)
    assert len(rig.table) == 0 and rig.table.pool.num_available == rig.table.pool.capacity
    told.listen()
    again = Told(rig, make_open([*told.tokens, 1, 2, 5], generation=2, prompt_tokens=10))
    rig.turns(3)
    assert again.listen()


@pytest.mark.parametrize(
    "message",
    [
        Commit(9, 1, 10, [5], 10),
        Commit(1, 3, 10, [5], 10),
        Commit(1, 1, 10, [VOCAB], 10),
        Commit(1, 1, 9, [5, 6], 10),
        Commit(1, 1, 11, [5, 6], 10),
    ],
    ids=["no session", "an Open was lost", "token", "a token again and another", "a gap"],
)
def test_what_cannot_be_followed_is_asked_for(rig: Rig, message: Commit) -> None:
    Told(rig, make_open(prompt(10)))
    rig.turns(2)
    rig.say(TARGET, message)
    rig.turns()
    (resync,) = rig.heard(TARGET, Resync)
    assert (resync.session, resync.generation) == (message.session, message.generation)


def test_older_generations_are_not_heard(rig: Rig) -> None:
    told = Told(rig, make_open(prompt(10), generation=3))
    rig.turns(2)
    rig.say(TARGET, Commit(1, 2, 10, [5], 10), Close(1, 2), make_open(prompt(5), generation=2))
    rig.say(TARGET, make_open(prompt(5), generation=3))
    rig.turns()
    assert rig.session().tokens == told.tokens and not rig.heard(TARGET, Resync)
    assert told.listen()


def test_a_session_opened_anew_keeps_the_kv_that_both_have(rig: Rig) -> None:
    told = Told(rig, make_open(prompt(40)))
    rig.turns(5)
    told.listen()
    kept = rig.session().slots[:30].copy()
    again = Told(rig, make_open([*prompt(40)[:30], *prompt(9, 1)], generation=2))
    rows = rig.worker.machine.counts.rows
    rig.turns()
    assert rig.session().slots[:30].tolist() == kept.tolist()
    rig.turns(3)
    assert rig.worker.machine.counts.rows - rows <= 9 + 4 * SMALL.leaves
    assert again.listen()


def test_the_same_tokens_again_compute_the_last(rig: Rig) -> None:
    Told(rig, make_open(prompt(10)))
    rig.turns(5)
    rig.heard(TARGET, Tree)
    again = Told(rig, make_open(prompt(10), generation=2))
    rig.turns(2)
    assert again.listen()


# -- KV between sessions


def turn_after(told: Told, session: int, peer: bytes = TARGET, tenant: str = "", **fields: Any) -> tuple[Told, int]:
    """A session that begins with another's tokens, and how many rows its prompt took."""
    rig, rows = told.rig, list[int]()
    rig.worker.observe = lambda record: rows.append(record.prompt_rows)
    tokens = [*told.tokens, *prompt(9, session)]
    opened = msgspec.structs.replace(make_open(tokens, session, generation=3, wanted=30), **fields)
    rig.say(peer, HELLO, tenant=tenant)
    again = Told(rig, opened, peer, tenant=tenant)
    rig.rest()
    assert again.listen()
    return again, sum(rows)


def test_the_next_turn_computes_only_what_is_new(rig: Rig) -> None:
    """Whatever its sampling; and its trees are what the model says. Nodes that were not committed are not found."""
    told = Told(rig, make_open(prompt(40), sampling=SAMPLINGS["warm"]))
    rig.rest()
    told.listen()
    told.commit(told.guesses()[0])
    rig.rest()
    told.listen()
    told.close()
    second, rows = turn_after(told, 2, sampling=SAMPLINGS["greedy"])
    assert rows == 9 and rig.worker.machine.counts.cached == len(told.tokens)
    second.close()
    _, rows = turn_after(second, 3)
    assert rows == 9


def test_a_session_that_was_evicted_finds_its_kv_again(llama: Path) -> None:
    rig = greeted(llama, slots=300)
    told = Told(rig, make_open(prompt(150)))
    rig.rest()
    told.listen()
    rig.table.evict(rig.session())
    rows = rig.worker.machine.counts.rows
    told.chances.clear()
    told.commit([5])
    rig.turns()
    assert rig.worker.machine.counts.rows - rows == 1 and told.listen()


@pytest.mark.parametrize(
    ("peer", "tenant", "salt", "shared"),
    [
        (b"one", "tenant", None, True),
        (b"two", "tenant", None, True),
        (b"two", "other", None, False),
        (b"one", "tenant", b"s" * 16, False),
        (b"two", "", None, False),
    ],
)
def test_only_sessions_of_one_tenant_and_salt_share(
    rig: Rig, peer: bytes, tenant: str, salt: bytes | None, shared: bool
) -> None:
    rig.say(b"one", HELLO, tenant="tenant")
    told = Told(rig, make_open(prompt(40)), b"one", tenant="tenant")
    rig.rest()
    _, rows = turn_after(told, 2, peer, tenant, salt=salt)
    assert rows == (9 if shared else 49)


def test_targets_are_told_what_was_found(rig: Rig) -> None:
    told = Told(rig, make_open(prompt(40)))
    rig.rest()
    turn_after(told, 2)
    rig.say(b"other", HELLO)
    rig.now += 1.0
    rig.turns()
    assert [rig.heard(peer, Load)[-1].own_cached for peer in (TARGET, b"other")] == [40, 0]


def named(opened: Open, tokens: int, salt: bytes | None = None) -> Open:
    """The same with a key of its first `tokens`."""
    key = prefix_keys(text_root(salt), opened.tokens)[tokens // OBJECT_TOKENS - 1]
    return msgspec.structs.replace(opened, tokens=opened.tokens[tokens:], prefix_key=key, salt=salt)


def test_an_open_may_name_what_the_target_told_before(rig: Rig) -> None:
    """Of an Open, at once; of Commits, once the session has ended. Trees are what the model says of all tokens."""
    told = Told(rig, make_open(prompt(100)))
    again = make_open([*told.tokens, 5], 2)
    rig.say(TARGET, named(again, 64))
    rig.rest()
    assert [session.tokens for session in rig.table] == [told.tokens, [*told.tokens, 5]]
    told.commit(prompt(60, 3))
    told.close()
    rig.rest()
    third = make_open([*told.tokens, *prompt(9)], 3)
    rig.heard(TARGET, Tree)
    listener = Told(rig, third)
    rig.channel.inbox[-1:] = []
    rig.say(TARGET, named(third, 128))
    rig.rest()
    assert listener.listen() and not rig.heard(TARGET, Resync)


@pytest.mark.parametrize(
    "case", ["never told", "of another target", "of another salt", "forgotten", "nothing is kept", "no key of tokens"]
)
def test_a_key_that_is_not_known_is_answered_with_resync(rig: Rig, case: str) -> None:
    """And the session that it was to replace is gone."""
    rig.say(b"other", HELLO)
    told, salt = make_open(prompt(100), 5), b"s" * 16 if case == "of another salt" else None
    if case != "never told":
        rig.say(b"other" if case == "of another target" else TARGET, told)
    rig.say(TARGET, make_open(prompt(9), 1))
    rig.turns()
    if case == "forgotten":
        rig.worker.machine.known.forget(TARGET)
    if case == "nothing is kept":
        rig.worker.machine.known = KnownPrefixes(most=0)
    message = named(make_open(prompt(100), 1, generation=2), 64, salt)
    if case == "no key of tokens":
        message = msgspec.structs.replace(message, prefix_key=b"k" * 32)
    rig.say(TARGET, message)
    rig.turns()
    (resync,) = rig.heard(TARGET, Resync)
    assert (resync.session, resync.generation) == (1, 2) and "prefix_key" in resync.reason
    assert SessionKey(TARGET, 1) not in {session.key for session in rig.table}
    again = Told(rig, make_open(prompt(100), 1, generation=3))
    rig.heard(TARGET, Tree)
    rig.rest()
    assert again.listen()


def test_a_named_prefix_may_be_all_or_too_long(rig: Rig) -> None:
    rig.say(TARGET, make_open(prompt(128), 1), named(make_open(prompt(128), 2), 128))
    long = make_open([*prompt(128), *[1] * 1900], 3)
    rig.say(TARGET, named(long, 128))
    rig.turns()
    assert [len(session.tokens) for session in rig.table] == [128, 128]
    (refusal,) = rig.heard(TARGET, Refuse)
    assert refusal.session == 3 and "2028" in refusal.reason


def test_what_is_known_by_key_goes_with_its_target(rig: Rig) -> None:
    rig.say(TARGET, make_open(prompt(100)))
    rig.turns()
    known = rig.worker.machine.known
    assert len(known) == 1
    rig.now += draft_machine.SILENCE + 1
    rig.turns()
    assert len(known) == 0


def test_only_a_draft_that_keeps_kv_says_that_it_knows_keys(llama: Path) -> None:
    for cached in (True, False):
        rig = Rig(llama, cached=cached)
        rig.say(TARGET, HELLO)
        rig.turns()
        assert rig.heard(TARGET, Load)[-1].capabilities.count(PREFIX_KEYS) == cached


# -- too little room


def test_idle_sessions_give_way_and_come_back(llama: Path) -> None:
    rig = greeted(llama, slots=300)
    first = Told(rig, make_open(prompt(150), 1))
    rig.rest()
    first.listen()
    rig.now += IDLE + 0.1
    second = Told(rig, make_open(prompt(200, 1), 2))
    rig.rest()
    assert second.listen()
    assert [session.evicted for session in rig.table] == [True, False]
    rig.now += IDLE + 0.1
    first.chances.clear()  # it has lost its tree, and pushes it again
    first.commit([5])
    rig.rest()
    assert first.listen()
    assert [session.evicted for session in rig.table] == [False, True]


def test_a_sequence_in_use_does_not_give_way(llama: Path) -> None:
    rig = greeted(llama, slots=300)
    first = Told(rig, make_open(prompt(200), 1))
    rig.rest()
    Told(rig, make_open(prompt(200, 1), 2))
    rig.rest()
    assert not any(session.evicted for session in rig.table) and first.listen()


@pytest.mark.parametrize("peers", [(b"one", b"one"), (b"one", b"two")], ids=["one tenant", "two tenants"])
def test_two_halves_of_prompts_do_not_block_each_other(llama: Path, peers: tuple[bytes, bytes]) -> None:
    """Both were begun, and there is room for one."""
    rig, told = Rig(llama, slots=700), []
    for number, peer in enumerate(peers, 1):
        rig.now += 0.01
        rig.say(peer, HELLO)
        told.append(Told(rig, make_open(prompt(600, number), number), peer))
        rig.turns()
    rig.rest()
    assert sum(bool(one.listen()) for one in told) == 1


def test_what_may_bring_a_tree_comes_before_what_widens_one(llama: Path) -> None:
    rig = greeted(llama, slots=200)
    told = [Told(rig, make_open(prompt(90, number), number, wanted=0)) for number in (1, 2)]
    told[0].commit([1], wanted=10**4)
    rig.turns(4)
    told[1].commit([1], wanted=10**4)
    rig.turns(1)
    assert told[0].listen() and rig.table.pool.num_free > 0
    level = rig.worker.machine.next_level(0.0)
    assert [part.session.key.number for part in level if part.pending] == [2]


def test_a_tenant_holds_no_more_than_its_share_when_others_need_it(llama: Path) -> None:
    """However often it commits: one that holds less than its share gets a tree."""
    rig = Rig(llama, slots=600)
    rig.say(b"greedy", HELLO, tenant="greedy")
    for number in range(1, 6):
        rig.say(b"greedy", make_open(prompt(100, number), number, wanted=10**6), tenant="greedy")
    rig.turns(30)
    assert rig.table.pool.num_free < 100
    rig.say(b"modest", HELLO, tenant="modest")
    told = Told(rig, make_open(prompt(150)), b"modest")
    rig.turns(20)
    assert told.listen()


def test_prompts_of_one_tenant_do_not_starve_anothers(llama: Path) -> None:
    """Newest first would: the flood is always newer."""
    rig = Rig(llama, slots=6000)
    rig.say(b"flood", HELLO)
    rig.say(b"modest", HELLO)
    told = Told(rig, make_open(prompt(600)), b"modest")
    for turn in range(14):
        rig.now += 0.01
        rig.say(b"flood", make_open(prompt(300, turn), 1 + turn))
        rig.turns()
    assert told.listen()


def test_too_many_sessions_cost_the_tenant_that_has_them(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (draft_sessions, draft_machine):
        monkeypatch.setattr(module, "MAX_SESSIONS", 4)
    rig = Rig(llama)
    for peer in (b"flood", b"modest"):
        rig.say(peer, HELLO)
    for number in range(1, 7):
        rig.say(b"flood", make_open(prompt(5), number))
    rig.turns()
    assert [(r.session, "4" in r.reason) for r in rig.heard(b"flood", Refuse)] == [(5, True), (6, True)]
    for number in (1, 2, 3):
        rig.say(b"modest", make_open(prompt(5), number))
    rig.turns()
    assert sorted(session.key.target for session in rig.table) == [b"flood", b"flood", b"modest", b"modest"]
    assert [r.session for r in rig.heard(b"modest", Refuse)] == [3]


def test_too_many_targets_cost_the_tenant_that_has_them(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MAX_TARGETS", 2)
    rig = Rig(llama)
    for number in range(3):
        rig.say(b"flood %d" % number, HELLO, tenant="flood")
    rig.say(b"modest", HELLO, tenant="modest")
    rig.turns()
    assert rig.heard(b"flood 2", Refuse) and not rig.heard(b"flood 2", Load)
    assert rig.heard(b"modest", Load) and rig.heard(b"flood 1", Load)


def test_tenants_share_a_saturated_level_by_weight(llama: Path) -> None:
    rig = Rig(llama, slots=6000)
    rows = {}
    for name, weight in (("heavy", 3.0), ("light", 1.0)):
        rig.say(name.encode(), HELLO, tenant=name, weight=weight)
        rig.say(name.encode(), make_open(prompt(5), wanted=10**6), tenant=name, weight=weight)
    rig.turns(100)
    rig.now += 1.0
    rig.turns()
    for name in ("heavy", "light"):
        rows[name] = rig.heard(name.encode(), Load)[-1].own_rows
    assert rows["heavy"] / rows["light"] == pytest.approx(3.0, rel=0.1)


# -- silence


def test_sessions_of_a_silent_target_are_dropped(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_sessions, "FORGOTTEN", 60.0)
    Told(rig, make_open(prompt(10)))
    rig.say(b"other", HELLO)
    Told(rig, make_open(prompt(10)), b"other")
    rig.turns(3)
    rig.now += draft_machine.SILENCE - 1
    rig.say(b"other", HELLO)
    rig.turns()
    assert len(rig.table) == 2
    rig.now += 2
    rig.turns()
    assert [session.key.target for session in rig.table] == [b"other"]
    rig.say(TARGET, Commit(1, 1, 10, [5], 10))
    rig.turns()
    assert rig.heard(TARGET, Refuse)[-1].session == CONNECTION


def test_a_sequence_is_not_forgotten_for_the_time_that_its_prompt_took(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its target hears nothing meanwhile, greets, and keeps its commits back."""
    grow = rig.worker.grower.grow

    def slow(level: list[LevelPart]) -> list[NewNodes]:
        rig.now += FORGOTTEN + 5.0 if level[0].pending else 0.001
        rig.say(TARGET, HELLO)
        return grow(level)

    monkeypatch.setattr(rig.worker.grower, "grow", slow)
    told = Told(rig, make_open(prompt(10)))
    rig.turns(3)
    assert told.listen() and len(rig.table) == 1
    told.commit([5])
    rig.turns()
    assert not rig.heard(TARGET, Resync)


def test_a_forgotten_sequence_is_asked_for_when_it_goes_on(rig: Rig) -> None:
    told = Told(rig, make_open(prompt(10)))
    rig.turns(3)
    for _ in range(20):
        rig.now += FORGOTTEN / 18
        rig.say(TARGET, HELLO)
        rig.turns()
    assert len(rig.table) == 0 and rig.table.pool.num_available == rig.table.pool.capacity
    told.commit([5])
    rig.turns()
    assert [r.session for r in rig.heard(TARGET, Resync)] == [1]


# -- hostile targets


@pytest.mark.parametrize(
    "opened",
    [
        make_open([], prompt_tokens=1),
        make_open([VOCAB]),
        make_open([1] * CONTEXT),
        make_open([1] * 2000),  # as many as there are slots
        make_open([1], sampling=RequestSampling(temperature=float("nan"))),
        make_open([1], sampling=RequestSampling(temperature=float("inf"))),
        make_open([1], sampling=RequestSampling(temperature=-1.0)),
        make_open([1], sampling=RequestSampling(top_p=0.0)),
        make_open([1], sampling=RequestSampling(min_p=float("nan"))),
        make_open([1], sampling=RequestSampling(repetition_penalty=0.0)),
        make_open([1], sampling=RequestSampling(presence_penalty=1e300)),
        make_open([1], sampling=RequestSampling(logit_bias={1: float("nan")})),
    ],
    ids=range(12),
)
def test_an_open_that_cannot_be_served_is_refused(rig: Rig, opened: Open) -> None:
    rig.say(TARGET, opened)
    told = Told(rig, make_open(prompt(5), 2))
    rig.turns(2)
    (refusal,) = rig.heard(TARGET, Refuse)
    assert (refusal.session, refusal.generation) == (1, 1)
    assert told.listen()


@pytest.mark.parametrize(
    "sampling",
    [
        RequestSampling(allowed_token_ids=[]),
        RequestSampling(temperature=0.0, allowed_token_ids=[VOCAB + 1]),
        RequestSampling(bad_token_ids=list(range(VOCAB))),
        RequestSampling(temperature=5e-324, top_k=2**31 - 1, min_p=1.0),
        RequestSampling(temperature=100.0, top_p=1e-6),
        RequestSampling(bad_sequences=[[], [2**31 - 1], [1] * 5000], stop_ids=list(range(VOCAB)), min_tokens=2**31 - 1),
        RequestSampling(logit_bias={2**31 - 1: 100.0, 0: -100.0}, repetition_penalty=0.01, presence_penalty=-2.0),
    ],
    ids=range(7),
)
def test_senseless_sampling_harms_nobody(rig: Rig, sampling: RequestSampling) -> None:
    """Where every token is excluded there is nothing to guess; others' trees are what they would be."""
    rig.say(TARGET, make_open([1, 2], 1, sampling=sampling, seed=2**64 - 1, prompt_tokens=2**31 - 1))
    told = Told(rig, make_open(prompt(5), 2, sampling=RequestSampling(temperature=0.8)))
    for _ in range(6):
        rig.turns()
    assert told.listen()


def test_huge_wishes_are_cut(rig: Rig) -> None:
    rig.say(TARGET, make_open([1, 2], wanted=2**31 - 1, max_length=2**31 - 1))
    rig.turns(2)
    assert rig.session().wanted == MAX_NODES and rig.session().max_length == 2000
    rig.say(TARGET, Commit(1, 1, 2, [5], 2**31 - 1))
    rig.turns()
    assert rig.session().wanted == MAX_NODES


def test_a_frame_longer_than_any_open_is_no_message(rig: Rig) -> None:
    told = Told(rig, make_open(prompt(10)))
    rig.turns(2)
    rig.channel.inbox.append(Received(TARGET, bytes(worker.FRAME_BASE + 5 * CONTEXT + 1)))
    rig.turns(2)
    assert rig.worker.machine.counts.malformed == 1
    assert rig.session().tokens == told.tokens and told.listen()


def test_the_longest_constraint_is_taken(rig: Rig) -> None:
    """Of characters of four bytes, beside parameters that are long too."""
    ids = list(range(1 << 14))
    sampling = RequestSampling(logit_bias=dict.fromkeys(ids, 0.5), bad_token_ids=ids, stop_ids=ids)
    longest = Constraint("regex", "\U0001f41f" * MAX_LENGTH)
    Told(rig, make_open(prompt(10), constraint=longest, sampling=sampling))
    rig.turns(2)
    assert rig.session().grammar is not None and rig.worker.machine.counts.malformed == 0


def test_a_flood_of_frames_waits_for_the_next_level(rig: Rig) -> None:
    """Each turn takes some, and grows."""
    told = Told(rig, make_open(prompt(10), wanted=10**6))
    rig.turns()
    ticks = iter(range(10**6))
    rig.worker._clock = lambda: rig.now + 0.004 * next(ticks)
    rig.say(b"flood", *[HELLO] * 100)
    for turn in range(5):
        assert rig.worker.turn(0.0) and len(told.listen()) == 1 + (turn == 0)
    assert 0 < len(rig.worker._inbox) < 100


def test_a_level_fits_into_one_frame() -> None:
    LevelShape(1024, 16)
    for leaves, children in ((1024, 17), (0, 5), (5, 0)):
        with pytest.raises(ParameterError, match="children"):
            LevelShape(leaves, children)


def test_frames_that_nobody_takes_are_lost_not_waited_for(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target sees a gap when it listens again."""
    monkeypatch.setattr(loopback, "HIGH_WATER", 20)
    here, there = Loopback.pair(TARGET)
    rig = Rig(llama, LevelShape(1, 1))
    rig.worker.channel = there
    for message in (HELLO, make_open(prompt(5), wanted=10**6, max_length=1900)):
        here.send(b"0", encode(message))
    rig.turns(30)
    assert len(here.receive(0.0)) == 20
