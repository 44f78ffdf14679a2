"""A draft is sent frames that nearly are messages, among those of the sessions that they speak of, and what it holds
stays bounded; a target beside them is served as if they had not come."""

import logging
from collections import defaultdict
from pathlib import Path
from random import Random

import pytest
from mutants import mutant, resident_bytes
from rig import HELLO, Rig, Told, make_open, prompt
from sizes import sized
from support import VOCAB

from pilotfish.core.drafting import messages
from pilotfish.core.peers.fields import Echo, Error
from pilotfish.wire.channel import Received, decode_to_target

FRAMES = sized(6_000, 1_000_000)
HONEST, VANDALS = b"honest", (b"vandal", b"hun")
SESSIONS = 6
#: Frames between two levels: the honest target's trees are checked against the model, which takes time.
EACH = sized(40, 400)
#: How much a process may grow once it has had a fifth of the frames.
GROWTH = 32 << 20


class Vandal:
    """Opens and feeds sessions as it should, and beside that sends mutants of the same messages."""

    def __init__(self, rig: Rig, peer: bytes, draw: Random) -> None:
        self.rig, self.peer, self.draw = rig, peer, draw
        self.lengths: dict[int, int] = {}
        self.generations: dict[int, int] = defaultdict(int)

    def send(self) -> None:
        message = self._message()
        if self.draw.random() < 0.1:
            self._note(message)
            self.rig.say(self.peer, message)
        else:
            self.rig.channel.inbox.append(Received(self.peer, mutant(self.draw, message)))

    def _message(self) -> messages.ToDraft:
        session, draw = 1 + self.draw.randrange(SESSIONS), self.draw
        generation, length = self.generations[session] or 1, self.lengths.get(session, 3)
        kind = draw.randrange(10)
        if kind == 0:
            return messages.Hello(
                *(1, HELLO.tokenizer, VOCAB, "vandal"), capabilities=list(messages.TARGET_CAPABILITIES), echo=Echo(7)
            )
        if kind == 1:
            return messages.TreeFeedback(session, generation, length, [1, 2], [1], [3])
        if kind == 2:
            return draw.choice((messages.Pause, messages.Resume))(session, generation)
        if kind == 3:
            return Error("gap", "tree", "numbered from 0 on", 3, session, generation)
        if kind == 4:
            return messages.Close(session, generation)
        if kind <= 6 or session not in self.lengths:
            text, sampling = (
                prompt(3 + draw.randrange(40), session),
                messages.RequestSampling(temperature=0.7, top_k=20),
            )
            return make_open(text, session, generation + 1, sampling, max_length=120, wanted=20)
        return messages.Commit(session, generation, length, prompt(1 + draw.randrange(4), length), 20)

    def _note(self, message: messages.ToDraft) -> None:
        if isinstance(message, messages.Open):
            self.lengths[message.session], self.generations[message.session] = len(message.tokens), message.generation
        elif isinstance(message, messages.Commit):
            self.lengths[message.session] += len(message.tokens)
        elif isinstance(message, messages.Close):
            self.lengths.pop(message.session, None)


def test_frames_that_nearly_are_messages(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)  # lines would be kept, for all the frames
    rig, draw = Rig(llama, slots=1200), Random(5)
    rig.say(HONEST, HELLO)
    told = Told(rig, make_open(prompt(20), wanted=20), HONEST)
    vandals = [Vandal(rig, peer, draw) for peer in VANDALS]
    settled, pushes = 0, 0
    for number in range(FRAMES):
        draw.choice(vandals).send()
        if number % EACH == 0:
            rig.now += 0.05
            rig.turns(2)
            pushes += len(told.listen())
            _forget(rig)
        if number % 1000 == 0:
            rig.say(HONEST, HELLO)
            told.commit([(number // 1000 + len(told.tokens)) % VOCAB])
        if len(told.tokens) > 200:
            told.close()
            told = Told(rig, make_open(prompt(20), told.opened.session, told.opened.generation + 1, wanted=20), HONEST)
        if number == FRAMES // 5:
            settled = resident_bytes()
    assert sum(target.malformed for target in rig.worker.machine._targets.values()) > FRAMES // 20  # it was garbage,
    assert sum(len(vandal.generations) for vandal in vandals) == 2 * SESSIONS  # and was not all that came
    assert resident_bytes() - settled < GROWTH
    rig.rest(2000)
    assert pushes + len(told.listen()) > FRAMES // (50 * EACH) and told.guesses()


def _forget(rig: Rig) -> None:
    """All that vandals were told; it is messages."""
    for peer in list(rig.channel.sent):
        if peer != HONEST:
            for frame in rig.channel.sent.pop(peer):
                decode_to_target(frame)
