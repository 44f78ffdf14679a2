"""The draft worker: it grows what its model says, whatever was committed, evicted or lost, and nobody harms others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rig import HELLO, IDENTITY, SAMPLINGS, SMALL, Rig, Told, make_open, prompt
from support import CONTEXT, VOCAB, edit_tensors, hits_of, tree_of, write_model

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS, prefix_keys, text_root
from pilotfish.core.drafting import draft_machine, draft_sessions
from pilotfish.core.drafting.draft_sessions import FORGOTTEN, LevelPart
from pilotfish.core.drafting.level_choice import LevelShape
from pilotfish.core.drafting.messages import (
    CONNECTION,
    MAX_NODES,
    Close,
    Commit,
    Load,
    Open,
    Pause,
    Refuse,
    RequestSampling,
    Resume,
    Resync,
)
from pilotfish.core.sampling.constraint import MAX_LENGTH, Constraint
from pilotfish.core.trees.lookahead import NewNodes
from pilotfish.errors import ParameterError
from pilotfish.wire.channel import Received
from pilotfish.workers import draft as worker

TARGET = b"target"


def greeted(model: Path, *shape: LevelShape, **options: Any) -> Rig:
    """By `TARGET`."""
    rig = Rig(model, *shape, **options)
    rig.say(TARGET, HELLO)
    return rig


# -- greetings


def test_nothing_is_done_before_a_hello(llama: Path) -> None:
    rig = Rig(llama)
    rig.say(TARGET, make_open([1]), Commit(1, 1, 1, [1], 1), Close(1, 1))
    rig.turns()
    told = {(refusal.session, refusal.reason) for refusal in rig.heard(TARGET, Refuse)}
    assert told == {(CONNECTION, "no Hello came before")} and len(rig.table) == 0


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
    added = {VOCAB: "<a>", VOCAB + 1: "<b>", VOCAB + 2: "<c>"}
    identity = replace(IDENTITY, added_tokens=added)
    rig = Rig(stubborn, LevelShape(leaves=4, children=8), vocab_size=VOCAB + len(added), identity=identity)
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


# -- growth


@pytest.mark.parametrize("name", SAMPLINGS)
def test_kept_kv_changes_no_guess(rig: Rig, name: str) -> None:
    """Hits, parts of hits, misses, tokens after a node that was not expanded: every later level is what a forward
    over the whole sequence gives."""
    rng = np.random.default_rng(sum(map(ord, name)))
    told = Told(rig, make_open(prompt(10), sampling=SAMPLINGS[name]))
    seen, hits = set(), hits_of(rig.table)
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
    assert len(seen) >= 4 and set(hits) == {True, False} and rig.worker.machine.used


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


@pytest.mark.parametrize(
    "message",
    [
        *(Commit(9, 1, 10, [5], 10), Commit(1, 3, 10, [5], 10), Commit(1, 1, 10, [VOCAB], 10)),
        *(Commit(1, 1, 9, [5, 6], 10), Commit(1, 1, 11, [5, 6], 10), Resume(5, 1), Pause(1, 2)),
    ],
    ids=["no session", "an Open was lost", "token", "a token again and another", "a gap", "resume", "pause"],
)
def test_what_cannot_be_followed_is_asked_for(rig: Rig, message: Commit | Pause | Resume) -> None:
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


# -- KV between sessions


def turn_after(told: Told, session: int, peer: bytes, tenant: str, salt: bytes | None) -> int:
    """Rows of a prompt that begins with another session's tokens."""
    rig, rows = told.rig, list[int]()
    rig.worker.observe = lambda record: rows.append(record.prompt_rows)
    opened = make_open([*told.tokens, *prompt(9, session)], session, generation=3, wanted=30)
    rig.say(peer, HELLO, tenant=tenant)
    again = Told(rig, msgspec.structs.replace(opened, salt=salt), peer, tenant=tenant)
    rig.rest()
    assert again.listen()
    return sum(rows)


@pytest.mark.parametrize(
    ("peer", "tenant", "salt", "shared"),
    [
        *((b"one", "tenant", None, True), (b"two", "tenant", None, True), (b"two", "other", None, False)),
        *((b"one", "tenant", b"s" * 16, False), (b"two", "", None, False)),
    ],
)
def test_only_a_tenants_equal_salts_share(rig: Rig, peer: bytes, tenant: str, salt: bytes | None, shared: bool) -> None:
    rig.say(b"one", HELLO, tenant="tenant")
    told = Told(rig, make_open(prompt(40)), b"one", tenant="tenant")
    rig.rest()
    rows = turn_after(told, 2, peer, tenant, salt)
    rig.now += 1.0
    rig.turns()
    found = rig.heard(peer, Load)[-1].own_cached
    assert (rows, found) == ((9, 40) if shared else (49, 0))


def named(opened: Open, tokens: int, salt: bytes | None = None) -> Open:
    """The same with a key of its first `tokens`."""
    key = prefix_keys(text_root(salt), opened.tokens)[tokens // OBJECT_TOKENS - 1]
    return msgspec.structs.replace(opened, tokens=opened.tokens[tokens:], prefix_key=key, salt=salt)


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


# -- too little room


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
    monkeypatch.setattr(draft_sessions, "MAX_SESSIONS", 4)
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


def test_tenants_share_a_saturated_level_by_weight(llama: Path) -> None:
    rig = Rig(llama, slots=6000)
    for name, weight in (("heavy", 3.0), ("light", 1.0)):
        rig.say(name.encode(), HELLO, tenant=name, weight=weight)
        rig.say(name.encode(), make_open(prompt(5), wanted=10**6), tenant=name, weight=weight)
    rig.turns(100)
    rig.now += 1.0
    rig.turns()
    heavy, light = (rig.heard(name, Load)[-1].own_rows for name in (b"heavy", b"light"))
    assert heavy / light == pytest.approx(3.0, rel=0.1)


# -- silence


def test_a_sequence_is_not_forgotten_for_the_time_its_prompt_took(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
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


# -- hostile targets


@pytest.mark.parametrize(
    "opened",
    [
        make_open([], prompt_tokens=1),
        make_open([VOCAB]),
        make_open([1] * CONTEXT),
        make_open([1] * 2000),  # as many as there are slots
        make_open([1], sampling=RequestSampling(temperature=float("nan"))),
        make_open([1], sampling=RequestSampling(min_p=float("nan"))),
        make_open([1], sampling=RequestSampling(logit_bias={1: float("nan")})),
    ],
    ids=range(7),
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
    assert rig.worker.machine._targets[TARGET].malformed == 1
    assert rig.session().tokens == told.tokens and told.listen()


def test_the_longest_constraint_is_taken(rig: Rig) -> None:
    """Of characters of four bytes, beside parameters that are long too."""
    ids = list(range(1 << 14))
    sampling = RequestSampling(logit_bias=dict.fromkeys(ids, 0.5), bad_token_ids=ids, stop_ids=ids)
    longest = Constraint("regex", "\U0001f41f" * MAX_LENGTH)
    Told(rig, make_open(prompt(10), constraint=longest, sampling=sampling))
    rig.turns(2)
    assert rig.session().grammar is not None and not rig.worker.machine._targets[TARGET].malformed


def test_a_flood_of_frames_waits_for_the_next_level(rig: Rig) -> None:
    """Each turn takes some, and grows."""
    told = Told(rig, make_open(prompt(10), wanted=10**6))
    rig.turns()
    ticks = iter(range(10**6))
    rig.worker.clock = lambda: rig.now + 0.004 * next(ticks)
    rig.say(b"flood", *[HELLO] * 100)
    for turn in range(5):
        assert rig.worker.turn(0.0) and len(told.listen()) == 1 + (turn == 0)
    assert 0 < len(rig.worker._inbox) < 100


def test_a_level_fits_into_one_frame() -> None:
    LevelShape(1024, 16)
    for leaves, children in ((1024, 17), (0, 5), (5, 0)):
        with pytest.raises(ParameterError, match="children"):
            LevelShape(leaves, children)
