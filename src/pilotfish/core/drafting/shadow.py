"""The score of a draft that guesses beside the live one, or where there is none.

No draft changes a token. So once a request has ended, the commit of a step over any tree is known, and a shadow can be
told of the request then, at the steps that would have been its own:

    live     ├── 1 ──┼── 2 ──┼── 1 ──┼── 1 ──┼── 1 ──┤ ended
    shadow                                             Open ├── 1 ──┼── 3 ──┼── 2 ──┤     tokens that a step commits
                                                               its tree as of each step's beginning, late or not

At the live steps' rhythm its trees would be deeper than they would be live: up to 140 % too many tokens a step in
simulations where a level takes half of a step; here about 1 % (docs/shadow.md). Each step takes as long as live steps
of as many rows, plus the longer work of its own loop for the trees.
"""

import hashlib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import pairwise

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from pilotfish.core.scheduling.calibration import RecentRate
from pilotfish.core.scheduling.step import RequestCommit, Step
from pilotfish.core.trees.tree import NO_TOKEN, Ints

#: Depths that are told apart; nodes below the last of them are in the sums alone.
DEPTHS = 8


def in_share(request: int, share: float) -> bool:
    """Whether the id is in a sample of all requests, the same for everybody."""
    digest = hashlib.blake2b(request.to_bytes(8), digest_size=8, person=b"pilotfish shadow").digest()
    return int.from_bytes(digest) < share * 2.0**64


def known_tokens(step: Step, known: Mapping[int, Sequence[int]]) -> Ints:
    """The target's token after each root and node of a step, by its requests' `known` tokens (by id); NO_TOKEN
    beyond an end. Below a wrong guess it is the one after the right guess, which no walk reaches. [step.num_samples]"""
    depths, given = step.forest.nodes.depths.tolist(), list[int]()
    for request, (first, end) in zip(step.requests, pairwise(step.forest.starts.tolist()), strict=True):
        tokens, base = known[request.id], len(request.tokens)
        places = (base, *(base + depth for depth in depths[first:end]))
        given += [tokens[place] if place < len(tokens) else NO_TOKEN for place in places]
    return np.array(given, np.int64)


class ShadowScore(Struct):
    """Sums over all requests that a shadow was told of. Steps are counted per sequence."""

    requests: int = 0  # begun
    steps: int = 0
    trees: int = 0
    late: int = 0  # steps for which the shadow had no node below the root
    accepted: int = 0  # nodes
    tokens: int = 0
    hits: int = 0  # steps whose tokens, the bonus token too, were in a tree that lives on
    #: Trees so deep whose path was accepted up to the depth before, and of them those accepted at this depth.
    tried_by_depth: list[int] = field(default_factory=lambda: [0] * DEPTHS)
    accepted_by_depth: list[int] = field(default_factory=lambda: [0] * DEPTHS)
    tokens_per_second: float = 0.0  # of a sequence that decodes, among as many as did live; 0: not known yet

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0


class ShadowTally:
    def __init__(self) -> None:
        self.sums = ShadowScore()
        self.speed = RecentRate()  # of a sequence

    def add(self, commits: Sequence[RequestCommit], hits: int) -> None:
        sums = self.sums
        sums.hits += hits
        for commit in commits:
            if commit.tokens:
                sums.steps += 1
                sums.tokens += len(commit.tokens)
                sums.accepted += commit.accepted
            if commit.nodes:
                sums.trees += 1
                for depth in range(min(commit.depth, DEPTHS)):
                    sums.tried_by_depth[depth] += commit.accepted >= depth
                    sums.accepted_by_depth[depth] += commit.accepted > depth

    def score(self) -> ShadowScore:
        """A copy, for any thread."""
        return replace(deepcopy(self.sums), tokens_per_second=self.speed.value)
