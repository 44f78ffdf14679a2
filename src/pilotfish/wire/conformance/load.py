"""Checks under load and their measurements. No figure is judged."""

import time
from statistics import median_high

from pilotfish.core.drafting.messages import RequestSampling
from pilotfish.wire.conformance.checks import CheckContext, CheckError, check, expect
from pilotfish.wire.conformance.player import Player
from pilotfish.wire.conformance.referee import PlayedSession

#: Tokens of prompts that are timed.
PROMPTS = (16, 64, 256, 1024, 4096, 16_384, 65_536)
COUNTS = (1, 4, 16, 64, 256)
ROUNDS = 10
#: Seconds within which a draft forgets targets of earlier checks, which went without a word: they would take its time.
FORGOTTEN = 12.0
#: So many that a draft is never done.
WANTED = 2048


@check("load", "many-sessions", "A draft serves many sessions, or refuses those that it has no room for.")
def many_sessions(bench: CheckContext) -> str:
    served, waiting = 0, bench.target()
    waiting.listen(FORGOTTEN, lambda: not waiting.loads[-1].sessions)
    for count in [count for count in COUNTS if count <= bench.options.sessions]:
        player = bench.target()
        sessions = [player.open(bench.loop(60, number), wanted=WANTED) for number in range(count)]
        _until_answered(bench, player, sessions)
        waits = sorted(_waits(bench, player, sessions))
        served = sum(bool(session.trees) for session in sessions)
        refused = sum(bool(session.refusals) for session in sessions)
        expect(served + refused >= count, f"of {count} sessions {served} got a Tree, and {refused} Refuse")
        if waits:
            bench.figure(f"Commit to the first Tree that knows it, {count} sessions, median", median_high(waits), "ms")
            bench.figure(f"the same, {count} sessions, 99th of 100", waits[int(0.99 * (len(waits) - 1))], "ms")
        for session in sessions:
            player.close(session)
    return f"{served} of {count} at once"


def _until_answered(bench: CheckContext, player: Player, sessions: list[PlayedSession]) -> None:
    for _ in range(3):
        if player.listen(bench.options.patience, lambda: all(one.trees or one.refusals for one in sessions)):
            return
        for session in sessions:
            player.commit(session, bench.loop(10))


def _waits(bench: CheckContext, player: Player, sessions: list[PlayedSession]) -> list[float]:
    """Milliseconds from a Commit of all sessions to each one's first Tree that knows it."""
    waits = []
    for number in range(ROUNDS):
        began = time.monotonic()
        for session in sessions:
            player.commit(session, bench.loop(1, len(session.tokens) % 10 + number))
        player.listen(1.0, lambda: all(one.base_len == len(one.tokens) for one in sessions))
        for session in sessions:
            fresh = zip(session.trees, session.arrivals, strict=True)
            times = [at for tree, at in fresh if tree.base_len == len(session.tokens)]
            waits += [1000 * (times[0] - began)] if times else []
    return waits


@check("load", "long-prompts", "Long prompts are read in pieces, and nothing else suffers.")
def long_prompts(bench: CheckContext) -> str:
    player = bench.target()
    longest = 0
    for length in [length for length in PROMPTS if length <= bench.options.context]:
        session = player.open(bench.loop(length, length))
        _until_answered(bench, player, [session])
        if session.trees:
            longest, took = length, session.arrivals[0] - session.opened_at
            bench.figure(f"Open of {length} tokens to the first Tree", 1000 * took, "ms")
        elif not session.refusals:
            raise CheckError(f"for a prompt of {length} tokens neither a Tree came nor Refuse")
        player.close(session)
    if player.echo.delay is not None:
        bench.figure("one way, by echoes", 1000 * player.echo.delay, "ms")
    return f"up to {longest} tokens"


@check("load", "noise-repeats", "Where the noise is mirrored, guesses depend on the seed.")
def noise_repeats(bench: CheckContext) -> str:
    """Not judged, as drafts may learn. Nothing else shows from here whether a draft mirrors the noise."""
    player = bench.target()
    text = bench.noise(50, bench.options.seed)
    trees = []
    for seed in (11, 11, 12):
        session = player.open(text, seed=seed, sampling=RequestSampling(temperature=1.0))
        bench.guessed(player, session, bench.options.patience / 3)
        trees.append([(node.token, node.position) for node in list(session.nodes.values())[:8]])
        player.close(session)
    if not any(trees):
        return "nothing was guessed for a text that says nothing"
    same = "the same" if trees[0] == trees[1] else "others"
    other = "others" if trees[0] != trees[2] else "the same"
    return f"first nodes of the same seed: {same}; of another seed: {other}"
