"""Checks of Hello's answer, and of a draft's description of itself."""

import time
from itertools import pairwise

import msgspec

from pilotfish.core.drafting.messages import ERRORS, PROTOCOL_VERSION, Commit
from pilotfish.wire.channel import encode
from pilotfish.wire.conformance.checks import CheckContext, CheckError, check, expect, expect_kept
from pilotfish.wire.conformance.player import Player

#: A version that no draft speaks.
FAR = 1000


@check("greeting", "answers-hello", "The first Hello of an incarnation is answered at once, with Load or Refuse.")
def answers_hello(bench: CheckContext) -> str:
    began = time.monotonic()
    bench.target()
    took = time.monotonic() - began
    expect(took <= 1.0, f"it took {took:.1f} s")
    return f"after {1000 * took:.0f} ms"


@check("greeting", "load-often", "Load is sent to every target a few times a second.")
def load_often(bench: CheckContext) -> str:
    player = bench.target()
    player.listen(3.0)
    times = player.load_times
    gaps = [after - before for before, after in pairwise(times)]
    expect(gaps and max(gaps) <= 1.0, f"{len(times)} Loads in 3 s, the longest gap {max(gaps, default=3.0):.1f} s")
    return f"{len(times) / 3:.1f} a second; the longest gap {1000 * max(gaps):.0f} ms"


@check("greeting", "refuses-version", "A version that the draft does not speak is refused, with session 0.")
def refuses_version(bench: CheckContext) -> str:
    return _refused(bench.stranger(version=FAR, oldest=FAR), "versions 1000 to 1000")


@check("greeting", "refuses-tokenizer", "A target of another tokenizer is refused, with session 0.")
def refuses_tokenizer(bench: CheckContext) -> str:
    return _refused(bench.stranger(tokenizer="another" * 9), "a foreign tokenizer")


def _refused(player: Player, what: str) -> str:
    player.greet()
    if not player.refusals:
        answer = "Load" if player.loads else "nothing"
        raise CheckError(f"to {what} the answer was {answer}")
    return player.refusals[0]


@check("greeting", "version-range", "A draft chooses the newest version of the target's range that it speaks.")
def version_range(bench: CheckContext) -> str:
    player = bench.target(version=FAR, oldest=PROTOCOL_VERSION)
    version = player.loads[-1].version
    if not PROTOCOL_VERSION <= version <= FAR:
        raise CheckError(f"Load says version {version} to a target that speaks {PROTOCOL_VERSION} to {FAR}")
    return f"version {version} of {PROTOCOL_VERSION} to {FAR}"


@check("greeting", "ignores-unknown-fields", "Fields and capabilities that a draft does not know are to be ignored.")
def ignores_unknown_fields(bench: CheckContext) -> str:
    player = bench.stranger(capabilities=[*bench.hello.capabilities, "telepathy"])
    player.greets = False
    player.send(_with_more(player.hello))
    player.greets = True
    expect(player.greet(), "a Hello with unknown fields was not answered with Load")
    session = bench.served(player)
    told = Commit(session.number, session.generation, len(session.tokens), bench.loop(10), 64)
    session.tokens.extend(told.tokens)
    session.told = len(session.tokens)
    player.send(_with_more(told))
    bench.expect_tree(player, session, "after a Commit with unknown fields no Tree came")
    return "in Hello and Commit"


def _with_more(message: object) -> bytes:
    fields = msgspec.msgpack.decode(encode(message), strict=False)
    return msgspec.msgpack.encode({**fields, "later": {"a": [1.5, None]}, "too": b"\0"})


@check("greeting", "ignores-unknown-messages", "Messages of a type that a draft does not know are to be ignored.")
def ignores_unknown_messages(bench: CheckContext) -> str:
    player = bench.target()
    session = bench.served(player)
    for number in range(100):
        player.send(msgspec.msgpack.encode({"type": "greeting", "session": session.number, "number": number}))
    player.commit(session, bench.loop(10))
    bench.expect_tree(player, session, "after 100 of them no Tree came")
    expect_kept(session)
    return "100 of them"


@check("capabilities", "names-unknown-messages", "A draft that says errors answers Error, unknown_type, to them.")
def names_unknown_messages(bench: CheckContext) -> str:
    player = bench.target_of(ERRORS)
    for _ in range(50):
        player.send(msgspec.msgpack.encode({"type": "greeting"}))
    player.listen(bench.options.patience, lambda: bool(player.errors))
    codes = [(error.code, error.about) for error in player.errors]
    expect(("unknown_type", "greeting") in codes, f"the Errors that came: {codes or 'none'}")
    player.listen(0.5)
    expect(len(player.errors) <= 2, f"{len(player.errors)} Errors within a second; one of a code is allowed")
    return "once, not 50 times"


@check("greeting", "before-hello", "Before a target has said Hello a draft ignores it, or refuses.")
def before_hello(bench: CheckContext) -> str:
    player = bench.stranger()
    player.greets = player.watches_silence = False
    session = player.open(bench.loop(60))
    player.listen(0.5)
    expect(not session.trees, "a Tree came for an Open before Hello")
    player.refusals.clear()
    player.greets = True
    expect(player.greet(), "it did not serve the target once it had said Hello")
    del player.sessions[session.number]
    bench.served(player)
    return "nothing was pushed; after Hello it served"


@check("greeting", "keeps-targets-apart", "A target is known by its incarnation; sessions are its own.")
def keeps_targets_apart(bench: CheckContext) -> str:
    first, second = bench.target(), bench.target()
    ours = bench.served(first)
    theirs = second.open(bench.loop(60, 5))
    second.next_number = 50
    third = second.open(bench.loop(60, 3))
    for player, session in ((second, theirs), (second, third), (first, ours)):
        player.commit(session, bench.loop(10))
        bench.guessed(player, session, bench.options.patience / 3)
    first.listen(0.3)
    expect(not first.referee.counts["tree-session"], "a Tree came to a target that has no such session")
    first.close(ours)
    second.commit(theirs, bench.loop(10))
    if not bench.guessed(second, theirs) or theirs.resyncs:
        raise CheckError("closing one target's session ended another's of the same number")
    return "two targets with sessions of the same numbers"


@check("greeting", "follows-reconnects", "After a reconnect a target is reached where it was last heard.")
def follows_reconnects(bench: CheckContext) -> str:
    incarnation = b"conformance kit " + bench.options.seed.to_bytes(4, "little")
    before = bench.stranger(incarnation)
    expect(before.greet(), "Hello was not answered")
    session = bench.served(before)
    session.lossy = True  # frames under way go to the connection before
    after = bench.stranger(incarnation)
    after.sessions, after.next_number = before.sessions, before.next_number  # it is the same target
    after.greet()
    after.commit(session, bench.loop(10))
    bench.expect_tree(after, session, "after the target came on another connection no Tree came there")
    return "the session went on there"
