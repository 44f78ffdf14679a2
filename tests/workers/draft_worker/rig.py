"""A draft worker that is stepped by hand, and targets that check what it pushes against the model itself."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from support import CONTEXT, VOCAB, RowSampling, native_model, sampling_of

from pilotfish.core.cache.prefix_cache import PrefixCache
from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.drafting.connected_targets import DraftIdentity
from pilotfish.core.drafting.draft_machine import DraftMachine
from pilotfish.core.drafting.draft_sessions import DraftSession, SessionTable
from pilotfish.core.drafting.level_choice import LevelShape
from pilotfish.core.drafting.messages import (
    PROTOCOL_VERSION,
    Close,
    Commit,
    Hello,
    Open,
    RequestSampling,
    ToDraft,
    ToTarget,
    Tree,
)
from pilotfish.core.peers.fields import Peer
from pilotfish.core.sampling.logit_rules import LogitRules
from pilotfish.core.scheduling.executor import NO_NODES, SequenceRows
from pilotfish.core.trees.lookahead import Lookahead
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.sampling import likely_tokens
from pilotfish.wire.channel import Received, decode_to_target, encode
from pilotfish.workers.draft import DraftWorker, Grower

SMALL = LevelShape(leaves=4, children=3)
IDENTITY = DraftIdentity("draft", "digest", {})
HELLO = Hello(PROTOCOL_VERSION, "digest", VOCAB, "target")
#: Of a target with `VOCAB` tokens.
SAMPLINGS = {
    "greedy": RequestSampling(temperature=0.0),
    "warm": RequestSampling(temperature=0.8),
    "filtered": RequestSampling(temperature=0.7, top_k=50, top_p=0.9, min_p=0.01),
    "penalized": RequestSampling(temperature=0.8, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3),
    "ruled": RequestSampling(
        temperature=0.9,
        logit_bias={33: 4.0, VOCAB + 5: 3.0},
        allowed_token_ids=list(range(20, 200)),
        bad_token_ids=[40, 10**9],
        bad_sequences=[[50], [33, 33], []],
        stop_ids=[60, 61],
        min_tokens=6,
    ),
}
ANSWER = TypeVar("ANSWER", bound=ToTarget)


class Box:
    """A channel to many targets: what they sent, what they were sent."""

    def __init__(self) -> None:
        self.inbox: list[Received] = []
        self.sent: dict[Peer, list[bytes]] = defaultdict(list)

    def send(self, peer: Peer, *frames: bytes) -> bool:
        self.sent[peer].extend(frames)
        return True

    def receive(self, timeout: float) -> list[Received]:  # noqa: ARG002
        frames, self.inbox = self.inbox, []
        return frames

    def wake(self) -> None:
        """Nobody waits."""

    def close(self) -> None:
        """Nothing is held."""


@cache
def loaded(directory: Path) -> TorchExecutor:
    """One for all that need no slots of their own."""
    return TorchExecutor(native_model(directory), CONTEXT)


class Rig:
    """A worker, its channel, and a clock that stands still."""

    def __init__(
        self,
        directory: Path,
        shape: LevelShape = SMALL,
        slots: int = 2000,
        cached: bool = True,
        vocab_size: int = VOCAB,
        identity: DraftIdentity = IDENTITY,
    ) -> None:
        self.now = 0.0
        self.directory = directory
        self.channel = Box()
        pool = SlotPool(slots)
        self.table = SessionTable(pool, PrefixCache(pool) if cached else None)
        self.executor = TorchExecutor(loaded(directory).model, slots, vocab_size=vocab_size)
        grower = Grower(self.executor, self.table, shape.children)
        machine = DraftMachine(identity, self.table, shape, self.executor.context)
        self.worker = DraftWorker(machine, grower, self.channel, lambda: self.now)

    def say(self, peer: Peer, *messages: ToDraft, tenant: str = "", weight: float = 1.0) -> None:
        for message in messages:
            self.channel.inbox.append(Received(peer, encode(message), tenant, weight))

    def turns(self, count: int = 1) -> None:
        """Every slot has one owner after each."""
        for _ in range(count):
            self.worker.turn(0.0)
            self.table.check()

    def rest(self, most: int = 500) -> None:
        """Until there is nothing to do."""
        for _ in range(most):
            if not self.worker.turn(0.0):
                self.table.check()
                return
        raise AssertionError("it grows on and on")

    def heard(self, peer: Peer, kind: type[ANSWER]) -> list[ANSWER]:
        """Messages of a kind to a target, in order; they are taken away."""
        messages = [decode_to_target(frame) for frame in self.channel.sent[peer]]
        self.channel.sent[peer] = [encode(m) for m in messages if not isinstance(m, kind)]
        return [m for m in messages if isinstance(m, kind)]

    def trees(self, peer: Peer, session: int) -> list[Tree]:
        """Those of a session, in order; they are taken away."""
        trees = self.heard(peer, Tree)
        self.channel.sent[peer] += [encode(tree) for tree in trees if tree.session != session]
        return [tree for tree in trees if tree.session == session]

    def session(self) -> DraftSession:
        """The only one."""
        (session,) = self.table
        return session

    def children_of(self, tokens: Sequence[int], message: Open) -> dict[int, float]:
        """Chances of what is likely after `tokens`, computed from nothing."""
        count, sampling = len(tokens), message.sampling
        rows = SequenceRows(0, tokens, np.arange(count, dtype=np.int32), NO_NODES, kept=[count - 1])
        logits = loaded(self.directory).forward([rows])
        prompt, output = tokens[: message.prompt_tokens], tokens[message.prompt_tokens :]
        params = sampling.params()
        rules = LogitRules.of(params, prompt, frozenset(sampling.stop_ids), sampling.bad_sequences)
        row = RowSampling(params, message.seed, count, None if rules is None else rules.edits(output))
        likely, chances = likely_tokens(logits, sampling_of([row], self.worker.grower.children))
        return dict(zip(likely[0].tolist(), chances[0].tolist(), strict=True))


@dataclass
class Told:
    """A target's sequence: what it told the draft, and what it heard of it."""

    rig: Rig
    opened: Open
    peer: Peer = b"target"
    tenant: str = ""
    tokens: list[int] = field(default_factory=list)
    pushes: int = 0
    paths: dict[int, tuple[int, ...]] = field(default_factory=dict)  # whole sequences that nodes stand for
    chances: dict[tuple[int, ...], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = list(self.opened.tokens)
        self.rig.say(self.peer, self.opened, tenant=self.tenant)

    def listen(self) -> list[Tree]:
        """Check what was pushed: each level is what the model says, given the sequence down to each parent."""
        trees = self.rig.trees(self.peer, self.opened.session)
        for tree in trees:
            assert (tree.generation, tree.sequence) == (self.opened.generation, self.pushes)
            self.pushes += 1
            self._check(tree)
        return trees

    def _check(self, tree: Tree) -> None:
        root = tuple(self.tokens[: tree.base_len])
        added: dict[tuple[int, ...], dict[int, float]] = {}
        for node, parent, token, chance in zip(tree.ids, tree.parents, tree.tokens, tree.scores, strict=True):
            above = root if parent == 0 else self.paths[parent]
            assert above[: len(root)] == root  # below the root
            assert (*above, token) not in self.chances
            added.setdefault(above, {})[token] = chance
            self.paths[node] = (*above, token)
            self.chances[*above, token] = chance
        for above, children in added.items():
            said = self.rig.children_of(above, self.opened)
            score = sum(self.chances[above[:n]] for n in range(len(root) + 1, len(above) + 1))
            kept = {token: chance for token, chance in said.items() if score + chance > Lookahead.FLOOR}
            assert children == pytest.approx(kept, abs=1e-5)

    def commit(self, tokens: Sequence[int], wanted: int | None = None) -> None:
        wanted = self.opened.wanted if wanted is None else wanted
        base_len, self.tokens = len(self.tokens), [*self.tokens, *tokens]
        self.rig.say(self.peer, Commit(self.opened.session, self.opened.generation, base_len, list(tokens), wanted))

    def close(self) -> None:
        self.rig.say(self.peer, Close(self.opened.session, self.opened.generation))

    def guesses(self) -> list[list[int]]:
        """Paths of the nodes that are still below the last token."""
        known, size = tuple(self.tokens), len(self.tokens)
        return [list(path[size:]) for path in self.chances if len(path) > size and path[:size] == known]


def prompt(length: int, seed: int = 0) -> list[int]:
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCAB, length).tolist()
    return tokens


def make_open(
    tokens: Sequence[int], session: int = 1, generation: int = 1, sampling: RequestSampling | None = None, **fields: int
) -> Open:
    defaults = {"prompt_tokens": len(tokens), "max_length": 1000, "seed": 7 + session, "wanted": 60}
    return Open(session, generation, list(tokens), sampling=sampling or RequestSampling(), **{**defaults, **fields})
