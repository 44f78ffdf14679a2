"""A request as a pool is told of it, and what came of all of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pilotfish.core.messages import Peer, Sampling, Tree
from pilotfish.core.request import Request
from pilotfish.core.tree import OTHER, TokenTree
from pilotfish.core.tree_copy import Push, TreeCopy
from pilotfish.target.pools import Pool


@dataclass
class RemoteSession:
    """A request as a pool was told of it."""

    number: int
    request: Request
    copy: TreeCopy
    pool: Pool | None = None  # None: to be opened at the next step
    untold: int = 0  # of its tokens, those that the pool was not told of
    told: float = 0.0  # when the pool was last told of any
    asked: bool = False  # whether nodes of it were wanted since its last commit
    lost: bool = False  # what the pool has of it cannot be followed: to be opened there anew
    generation: int = 0
    pushes: int = 0  # received of this generation
    opened: float = 0.0
    setbacks: int = 0  # one after the other, each soon after it was opened
    not_before: float = 0.0  # when it may be opened again
    refused_by: set[Peer] = field(default_factory=set)

    @property
    def followed_by(self) -> Pool | None:
        """The pool that can be told of its tokens now."""
        return self.pool if self.pool is not None and self.pool.ready and not self.lost else None

    def tree(self, count: int) -> TokenTree:
        """The `count` best nodes of what has come."""
        return self.copy.nodes.tree(count, OTHER if self.pool is None else self.pool.name)


@dataclass
class RemoteCounts:
    """What came of all sessions."""

    hits: int = 0  # commits that were in the tree
    misses: int = 0
    trees: int = 0  # frames attached
    nodes: int = 0  # in them
    opened: int = 0  # sessions, anew ones included
    moved: int = 0  # sessions whose pool was lost


@dataclass(frozen=True)
class Arrival:
    """A push that was attached."""

    at: float  # seconds, on the target's clock
    nodes: int


def push_of(message: Tree) -> Push:
    """As the tree's copy takes it."""
    ids, parents, tokens = (np.array(x, np.int64) for x in (message.ids, message.parents, message.tokens))
    return Push(message.base_len, ids, parents, tokens, np.array(message.scores, np.float64))


def sampling_of(request: Request) -> Sampling:
    """What a draft needs to know of a request's parameters."""
    params = request.params
    allowed = params.allowed_token_ids
    return Sampling(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
        allowed_token_ids=None if allowed is None else list(allowed),
        bad_token_ids=list(params.bad_token_ids),
        bad_sequences=[list(sequence) for sequence in request.bad_sequences],
        stop_ids=sorted(request.stop_ids),
        min_tokens=params.min_tokens,
    )
