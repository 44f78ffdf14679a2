"""A pool sends a target frames that nearly are messages, among those that are, and what the target holds stays bounded;
what the target verifies are trees, and a pool beside it drafts as if they had not come."""

import logging
from itertools import count
from random import Random

import pytest
from mutants import mutant, resident_bytes
from side import LIMITS, VOCAB, Side, load, make_request, tree
from sizes import sized

from pilotfish.core.drafting import messages, pools
from pilotfish.core.peers import peer as peers
from pilotfish.core.peers.fields import Echo, Error
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.tree import TokenTree
from pilotfish.wire.channel import Received, encode

FRAMES = sized(8_000, 1_000_000)
BAD, GOOD = b"0", b"1"
REQUESTS = 6
#: How much a process may grow once it has had a fifth of the frames.
GROWTH = 32 << 20
PATIENCE = ((pools, "MAX_FAULTS", 1 << 60), (peers, "GREETING", 0.0), (pools, "MOST_OPENED", 1 << 60))
LOADED = load(capabilities=[messages.FEEDBACK, messages.PROGRESS, messages.PAUSES, messages.ERRORS])


class Guesser:
    """A pool that pushes one tree for each Open and each Commit: 7 and 8 after the root, 9 after 7."""

    def __init__(self) -> None:
        self.opened: dict[int, messages.Open] = {}
        self.pushes: dict[int, int] = {}
        self.lengths: dict[int, int] = {}

    def hear(self, message: object) -> messages.Tree | None:
        if isinstance(message, messages.Open):
            self.opened[message.session], self.pushes[message.session] = message, 0
            self.lengths[message.session] = len(message.tokens)
        elif isinstance(message, messages.Commit) and message.session in self.opened:
            self.lengths[message.session] += len(message.tokens)
        elif isinstance(message, messages.Close):
            for known in (self.opened, self.pushes, self.lengths):
                known.pop(message.session, None)
        else:
            return None
        return self.push(message.session) if message.session in self.opened else None

    def push(self, session: int) -> messages.Tree:
        number = self.pushes[session]
        self.pushes[session] += 1
        first = 1 + 3 * number
        nodes = (first, 0, 7, -0.5), (first + 1, 0, 8, -1.0), (first + 2, first, 9, -0.25)
        return tree(self.opened[session], number, self.lengths[session], *nodes)


class Vandal(Guesser):
    """As that, and what it says beside, a tenth as it should be and the rest mutants."""

    def __init__(self, draw: Random) -> None:
        super().__init__()
        self.draw = draw

    def frame(self) -> bytes:
        if self.draw.random() < 0.1:
            return encode(self._message(push=self.push))
        return mutant(self.draw, self._message(push=self.nearly_pushed))

    def nearly_pushed(self, session: int) -> messages.Tree:
        """A push that was not, so that the next one is none too many."""
        pushed = self.push(session)
        self.pushes[session] -= self.draw.random() < 0.7
        return pushed

    def _message(self, push: object) -> messages.ToTarget:
        draw = self.draw
        session = draw.choice(sorted(self.opened) or [1])
        generation = self.opened[session].generation if session in self.opened else 1
        kind = draw.randrange(20)
        if kind < 10 and session in self.opened:
            return push(session)  # type: ignore[no-any-return, operator]
        if kind < 14:
            return messages.Load(
                "draft",
                3,
                3,
                10,
                100,
                1.0,
                1.0,
                echo=Echo(7),
                capabilities=[messages.FEEDBACK, messages.PAUSES],
                slots=200,
            )
        if kind == 14:
            return draw.choice((messages.Resync, messages.Refuse))(session, generation, "because")
        if kind == 15:
            return draw.choice((messages.Skip, messages.Progress))(session, generation, 5)
        if kind <= 17:
            return draw.choice((messages.Pause, messages.Resume))(session, generation)
        return Error("gap", "commit", "numbered", 1, session, generation)


class Stage:
    """A target between the two pools, and its requests."""

    def __init__(self, draw: Random, patient: bool) -> None:
        """`patient`: both pools guess for every request, and a fault is soon forgiven."""
        self.draw = draw
        self.side = Side(2, quarantine=0.01, pools_each=2) if patient else Side(2, quarantine=0.5)
        self.numbers = count()
        self.requests = [self._request() for _ in range(REQUESTS)]
        self.good, self.bad = Guesser(), Vandal(draw)
        self.guessed = 0

    def _request(self) -> Request:
        return make_request(next(self.numbers), prompt=5 + self.draw.randrange(30))

    def step(self) -> None:
        """One of the target's, in which some requests commit what was guessed."""
        self.side.now += self.draw.choice((0.05, 0.05, 0.3, 3.0))
        self.side.hear(LOADED, GOOD)
        self.side.drafter.tick()
        for request, nodes in zip(self.requests, self.side.propose(*self.requests), strict=True):
            check(nodes)
            self.guessed += {7, 8, 9} <= set(nodes.tokens.tolist())
            self.side.commit(request, *self.draw.choice(((7,), (7, 9), (1,), (8, 3))))
        self._answer()
        self._replace()

    def _answer(self) -> None:
        said, self.side.posted = self.side.posted, []
        for peer, message in said:
            pushed = (self.good if peer == GOOD else self.bad).hear(message)
            if pushed is not None:
                self.side.hear(pushed, peer)

    def _replace(self) -> None:
        for place, request in enumerate(self.requests):
            if len(request.tokens) > 300:
                self.side.drafter.close(request)
                self.requests[place] = self._request()


def check(nodes: TokenTree) -> None:
    """Parents before children, depths right, scores falling, tokens of the vocabulary."""
    assert len(nodes) <= LIMITS.nodes
    for node, (parent, token, depth, score) in enumerate(
        zip(nodes.parents, nodes.tokens, nodes.depths, nodes.scores, strict=True)
    ):
        assert -1 <= parent < node and 0 <= token < VOCAB
        assert depth == (1 if parent < 0 else nodes.depths[parent] + 1)
        assert score <= (0.0 if parent < 0 else nodes.scores[parent])


@pytest.mark.parametrize("patient", [False, True])
def test_mutants_harm_nobody(patient: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that sends such is left alone most of the time. A patient target hears it all."""
    caplog.set_level(logging.CRITICAL)  # lines would be kept, for all the frames
    if patient:
        for module, name, value in PATIENCE:
            monkeypatch.setattr(module, name, value)
    stage, settled = Stage(Random(3), patient), 0
    for number in range(FRAMES):
        stage.side.drafter.receive(Received(BAD, stage.bad.frame()))
        if number % 20 == 0:
            stage.step()
        if number == FRAMES // 5:
            settled = resident_bytes()
    bad, good = stage.side.pools
    assert bad.drops.occurred["malformed_frames"] > FRAMES // 20
    assert bad.score.trees > FRAMES // (40 if patient else 500)
    assert max(bad.drops.occurred.values()) < FRAMES << 16  # whatever a pool claims of itself
    assert not good.drops.occurred.keys() - {"late_nodes", "stale_frames"}
    assert stage.guessed > FRAMES // 40
    assert resident_bytes() - settled < GROWTH
