"""The trees of several pools for one request, as one.

    pool a    the ─┬─ cat  0.5       pool b    the ─── cat  0.7       merged    the ─┬─ cat  0.7   a, b
                   └─ dog  0.2                                                       └─ dog  0.2   a

A score says what its pool believes. Pools err in their own ways, so each pool's scores are first made what was seen of
its nodes of such scores (calibration.py). Where paths meet the best score holds, and the node is that pool's; each
pool is told of it, and each counts it as its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from pilotfish.core.drafting.remote_sessions import RemoteSession
from pilotfish.core.trees.tree import ROOT, Guesses


def merged(sessions: Sequence[RemoteSession], count: int) -> Guesses:
    """The `count` best nodes of the trees of all sessions of one request."""
    union = Guesses()
    for session in sessions:
        tree = session.copy.best(count, session.origin)
        if len(tree) and session.pool is not None:
            _add(union, tree, session.pool.score.calibrated(tree.scores), session.origin)
    return union.best(count)


def _add(union: Guesses, tree: Guesses, scores: Sequence[float], origin: str) -> None:
    """Add `tree` with other scores; a node that is there already gets the better one."""
    number, cut = {ROOT: ROOT}, {ROOT: 0.0}
    for node, (parent, token, score) in enumerate(zip(tree.parents, tree.tokens, scores, strict=True)):
        cut[node] = min(score, cut[parent])  # a path's chance does not rise along it
        number[node] = place = union.add(number[parent], token, cut[node], origin)
        if cut[node] > union.scores[place]:
            union.scores[place], union.origins[place] = cut[node], origin
