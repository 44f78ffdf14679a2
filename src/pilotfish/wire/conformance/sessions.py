"""Checks of Open, Commit and Close."""

import time

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS, prefix_keys, text_root
from pilotfish.core.drafting.messages import PAUSES, PREFIX_KEYS, Commit, Open, Pause, RequestSampling, Resume
from pilotfish.wire.conformance.checks import CheckContext, CheckError, check, expect, expect_kept
from pilotfish.wire.conformance.player import GRACE
from pilotfish.wire.conformance.referee import PlayedSession

#: Nodes beyond `wanted` that a level under way may add.
LEVEL = 1024


@check("sessions", "guesses", "A draft pushes Trees of the tokens that it guesses.")
def guesses(bench: CheckContext) -> str:
    player = bench.target()
    session = bench.served(player)
    player.close(session)
    return f"{sum(len(tree.ids) for tree in session.trees)} nodes in {len(session.trees)} Trees"


@check("sessions", "follows-commits", "A Commit extends the sequence, and re-roots the tree.")
def follows_commits(bench: CheckContext) -> str:
    player = bench.target()
    session, hits = bench.served(player), 0
    for number in range(12):
        length = len(session.tokens)
        roots = [node.token for node in session.live.values() if node.position == length]
        hit = bool(roots) and number % 3 > 0
        hits += hit
        player.commit(session, [roots[0]] if hit else bench.loop(1 + 10 * (number % 2), number))
        player.listen(0.1, lambda: session.base_len == len(session.tokens))
    player.commit(session, bench.loop(30))
    if not bench.guessed(player, session):
        raise CheckError(f"after 13 Commits the last Tree is of base_len {session.base_len}, not {len(session.tokens)}")
    expect_kept(session)
    return f"13 Commits, {hits} of them on the tree"


@check("sessions", "ignores-repeats", "A Commit that came twice, and an Open of an older generation, are ignored.")
def ignores_repeats(bench: CheckContext) -> str:
    player = bench.target()
    session = bench.served(player)
    pushes = session.pushes
    message = player.commit(session, bench.loop(10))
    opened = Open(session.number, 1, bench.loop(60), 60, 10_000, 7, RequestSampling(temperature=0.0), 64)
    player.say(message, opened, message)
    bench.expect_tree(player, session, "no Tree came after a Commit that came three times")
    player.listen(0.3)
    expect_kept(session)
    expect(session.trees[-1].sequence >= pushes, "an Open that came twice began the session anew")
    return "a Commit three times, an Open twice"


@check("sessions", "resyncs-gaps", "A Commit that does not follow, or of no session, is answered with Resync.")
def resyncs_gaps(bench: CheckContext) -> str:
    player = bench.target()
    ahead, higher = bench.served(player), bench.served(player, 3)
    unknown = PlayedSession(900, 4, bench.loop(60), 64, time.monotonic(), 60)
    player.sessions[900] = unknown
    player.say(Commit(ahead.number, 1, len(ahead.tokens) + 5, bench.loop(3), 64))
    higher.generation = 2
    player.say(Commit(higher.number, 2, len(higher.tokens), bench.loop(3), 64))
    player.say(Commit(900, 4, 60, bench.loop(3), 64))
    cases = {"beyond its tokens": ahead, "of a higher generation": higher, "of no session": unknown}
    player.listen(bench.options.patience, lambda: all(session.resyncs for session in cases.values()))
    silent = [what for what, session in cases.items() if not session.resyncs]
    expect(not silent, f"no Resync to a Commit {', nor '.join(silent)}")
    return "beyond its tokens, of a higher generation, of no session"


@check("sessions", "reopens", "An Open of a higher generation replaces the session.")
def reopens(bench: CheckContext) -> str:
    player = bench.target()
    session = bench.served(player)
    for number in range(5):
        session.tokens = bench.loop(60 + 10 * number, number)
        player.reopen(session)
        player.listen(0.05)
    if not bench.guessed_in_turns(player, [session], 2, shift=4):
        raise CheckError("after five reopenings no Tree of the last generation came")
    if session.trees[0].sequence != 0:
        raise CheckError(f"the first Tree of generation {session.generation} has sequence {session.trees[0].sequence}")
    return "five times"


@check("sessions", "serves-without-complaint", "Resync and Refuse are for what cannot be followed or served.")
def serves_without_complaint(bench: CheckContext) -> str:
    player = bench.target()
    sessions = [player.open(bench.loop(60, number)) for number in range(4)]
    for number in range(10):
        for session in sessions:
            player.commit(session, bench.loop(5, 5 * number))
        player.listen(0.05)
    player.listen(0.3)
    given_back = [reason for session in sessions for reason in session.resyncs + session.refusals]
    expect(not given_back, f"{len(given_back)} times, for one: {''.join(given_back[:1])}")
    return "4 sessions, 40 Commits"


@check("sessions", "stops-at-wanted", "A session stops at `wanted` nodes below its root; 0: none are wanted.")
def stops_at_wanted(bench: CheckContext) -> str:
    player = bench.target()
    session = bench.served(player)
    player.commit(session, bench.loop(10), wanted=16)
    player.listen(0.7)
    most = len(session.live)
    expect(most <= 16 + LEVEL, f"{most} nodes below the root, where 16 were wanted")
    player.commit(session, bench.loop(10), wanted=0)
    player.listen(1.2)
    length = len(session.tokens)
    if pushed := sum(len(tree.ids) for tree in session.trees if tree.base_len == length):
        raise CheckError(f"{pushed} nodes came after a Commit that wants none")
    player.commit(session, bench.loop(10), wanted=64)
    bench.expect_tree(player, session, f"no Tree came once nodes were wanted again, at length {length + 10}")
    return f"16 wanted: {most}; 0 wanted: none"


@check("sessions", "frees-closed", "Close ends a session, and Load tells how many there are.")
def frees_closed(bench: CheckContext) -> str:
    player = bench.target()
    sessions = [player.open(bench.loop(60, number)) for number in range(8)]
    if not player.listen(bench.options.patience, lambda: player.loads[-1].own_sessions == 8):
        raise CheckError(f"Load says {player.loads[-1].own_sessions} own_sessions, where 8 are open")
    for session in sessions:
        player.close(session)
    if not player.listen(bench.options.patience, lambda: player.loads[-1].own_sessions == 0):
        raise CheckError(f"Load says {player.loads[-1].own_sessions} own_sessions after all 8 were closed")
    player.listen(GRACE + 0.3)
    return "8 sessions"


@check("capabilities", "pauses", "A paused session is kept and grows nothing; Resume, or a Commit, ends that.")
def pauses(bench: CheckContext) -> str:
    player = bench.target_of(PAUSES)
    session = bench.served(player)
    player.say(Pause(session.number, session.generation))
    player.listen(GRACE / 2)
    before = len(session.trees)
    player.listen(0.5)
    expect(len(session.trees) == before, f"{len(session.trees) - before} Trees came for a paused session")
    player.say(Resume(session.number, session.generation))
    player.commit(session, bench.loop(10))
    if not bench.guessed(player, session) or session.resyncs:
        raise CheckError("the session did not go on after Resume and a Commit")
    return "nothing came while it was paused; then it went on"


@check("capabilities", "prefix-keys", "A prefix_key stands for tokens that were sent; one not known gets Resync.")
def prefix_keys_known(bench: CheckContext) -> str:
    player = bench.target_of(PREFIX_KEYS)
    text = bench.loop(3 * OBJECT_TOKENS + 5)
    session = player.open(text)
    bench.guessed(player, session, 1.0)
    player.close(session)
    keys = prefix_keys(text_root(None), text)
    named = 2 * OBJECT_TOKENS
    opened = player.open(text[named:], prefix_key=keys[1])
    opened.tokens, opened.told = list(text), len(text)
    if not bench.guessed_in_turns(player, [opened], 2, shift=len(text) % 10):
        reasons = opened.resyncs or ["no Tree came"]
        raise CheckError(f"an Open by the key of {named} tokens that were sent: {reasons[0]}")
    stranger = player.open(text[:8], prefix_key=bytes(32))
    if not player.listen(bench.options.patience, lambda: bool(stranger.resyncs)):
        raise CheckError("an Open by a key of nothing got no Resync")
    return "known, and unknown"
