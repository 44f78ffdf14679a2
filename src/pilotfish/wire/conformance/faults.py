"""Checks with frames that are lost, repeated, damaged or many."""

import time
from collections.abc import Callable
from random import Random

from pilotfish.core.drafting.messages import Close, Commit, Open, Pause, RequestSampling, Resume, TreeFeedback
from pilotfish.wire.channel import Received, encode
from pilotfish.wire.conformance.checks import CheckContext, CheckError, check, expect_kept
from pilotfish.wire.conformance.player import POOL, PlayerChannel

#: Frames of garbage between two looks at the answers.
BATCH = 200
#: Of frames, in a bad line.
LOST, REPEATED = 0.1, 0.1


class LosingLine:
    def __init__(self, inner: PlayerChannel, seed: int) -> None:
        self._inner, self._draw = inner, Random(seed)
        self.perfect = False

    def send(self, peer: bytes, *frames: bytes) -> bool:
        sent = [frame for frame in frames for _ in range(self._times())]
        return not sent or self._inner.send(peer, *sent)

    def receive(self, timeout: float) -> list[Received]:
        return [received for received in self._inner.receive(timeout) for _ in range(self._times())]

    def close(self) -> None:
        self._inner.close()

    def _times(self) -> int:
        drawn = self._draw.random()
        if self.perfect or drawn >= LOST + REPEATED:
            return 1
        return 0 if drawn < LOST else 2


@check("faults", "survives-loss", "Delivery does not hold: both sides notice a gap, and start the session again.")
def survives_loss(bench: CheckContext) -> str:
    player = bench.target()
    line = LosingLine(player.channel, bench.options.seed)
    player.channel = line
    player.watches_silence = False
    sessions = [player.open(bench.loop(60, number)) for number in range(4)]
    for session in sessions:
        session.lossy = True
    reopened = 0
    for number in range(60):
        for session in sessions:
            if session.resyncs:
                session.resyncs.clear()
                player.reopen(session)
                reopened += 1
            player.commit(session, bench.loop(5, 5 * number))
        player.listen(0.02)
    line.perfect = True
    for session in sessions:
        player.reopen(session)
    if not bench.guessed_in_turns(player, sessions, 3):
        raise CheckError("once the line was good again, and the sessions opened anew, no Trees came for some")
    return f"of 240 Commits a tenth was lost, a tenth came twice; {reopened} sessions were opened anew"


@check("faults", "survives-garbage", "A frame that is no message is dropped, and harms nobody.")
def survives_garbage(bench: CheckContext) -> str:
    player, vandal = bench.target(), bench.target()
    vandal.watches_silence = False
    session, draw = bench.served(player), Random(bench.options.seed)
    frames = mutations(draw, bench)
    for _ in range(0, bench.options.garbage, BATCH):
        for _ in range(BATCH):
            vandal.channel.send(POOL, frames())
        vandal.channel.receive(0.0)  # any answer to lies
        player.listen(0.005)
    heard = len(player.loads)
    if not player.listen(4 * bench.options.patience, lambda: len(player.loads) > heard + 1):
        raise CheckError("the draft said nothing any more")
    player.commit(session, bench.loop(10))
    bench.expect_tree(player, session, f"after {bench.options.garbage} mutated frames of another target no Tree came")
    expect_kept(session, "another target's garbage cost a session")
    bench.served(bench.target())
    return f"{bench.options.garbage} mutated frames of another target; sessions before and after went on"


def mutations(draw: Random, bench: CheckContext) -> Callable[[], bytes]:
    text, sampling = bench.loop(40), RequestSampling(temperature=0.0)
    seeds = (
        bench.hello,
        Open(1, 1, text, 40, 500, 7, sampling, 64),
        Commit(1, 1, 40, text[:5], 64),
        TreeFeedback(1, 1, 40, [1, 2, 3], [1]),
        Pause(1, 1),
        Resume(1, 1),
        Close(1, 1),
    )
    return lambda: mutated(draw, encode(draw.choice(seeds)))


def mutated(draw: Random, whole: bytes) -> bytes:
    frame = bytearray(whole)
    for _ in range(1 + draw.randrange(3)):
        place, kind = draw.randrange(len(frame)) if frame else 0, draw.randrange(5)
        if kind == 0 and frame:
            frame[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            frame[place:place] = draw.randbytes(1 + draw.randrange(4))
        elif kind == 2:
            del frame[place : place + 1 + draw.randrange(8)]
        elif kind == 3:
            frame = frame[:place]
        else:
            frame += frame[place:]
    return bytes(frame)


@check("faults", "survives-floods", "A draft bounds what it holds, and drops what it must.")
def survives_floods(bench: CheckContext) -> str:
    player = bench.target()
    player.watches_silence = False
    text, sampling = bench.loop(200), RequestSampling(temperature=0.0)
    numbers = range(10_000, 12_000)
    opens = [Open(number, 1, text, 200, 500, 7, sampling, 64) for number in numbers]
    for message in (*opens, *(Close(number, 1) for number in numbers)):
        player.channel.send(POOL, encode(message))
        player.channel.receive(0.0)
    began = time.monotonic()
    bench.served(bench.target())
    return f"2000 sessions opened and closed; {1000 * (time.monotonic() - began):.0f} ms later another was served"


@check("faults", "survives-restarts", "A target that was started again has another incarnation and is another target.")
def survives_restarts(bench: CheckContext) -> str:
    for number in range(6):
        player = bench.target()
        for shift in range(4):
            player.open(bench.loop(60, number + shift))
        player.listen(0.05)
        player.channel.close()
    bench.served(bench.target())
    return "six targets that went without a word"
