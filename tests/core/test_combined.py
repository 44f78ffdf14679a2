"""Several drafters, one tree."""

from __future__ import annotations

from collections.abc import Sequence

from support import follow, limits

from pilotfish.core.drafting.drafter import CombinedDrafter, Drafter, DraftLimits
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.tree import ROOT, Forest, Guesses


class Fixed(Drafter):
    """Proposes one path with one score a node; counts what it is told."""

    levels = 1

    def __init__(self, tokens: list[int], score: float) -> None:
        self.tokens, self.score, self.told = tokens, score, list[str]()

    def propose(self, requests: Sequence[Request], _: DraftLimits) -> list[Guesses]:
        return [self._tree() for _ in requests]

    def _tree(self) -> Guesses:
        tree, node = Guesses(), ROOT
        for depth, token in enumerate(self.tokens):
            node = tree.add(node, token, self.score * (depth + 1))
        return tree

    def expect(self, requests: Sequence[Request]) -> None:
        self.told.append(f"expect {[request.id for request in requests]}")

    def commit(self, request: Request, tokens: Sequence[int]) -> bool:
        self.told.append(f"commit {request.id} {list(tokens)}")
        return False

    def verified(self, requests: Sequence[Request], trees: Forest) -> None:
        self.told.append(f"verified {len(trees)} of {[request.id for request in requests]}")

    def flush(self) -> None:
        self.told.append("flush")

    def pause(self, request: Request) -> None:
        self.told.append(f"pause {request.id}")

    def close(self, request: Request) -> None:
        self.told.append(f"close {request.id}")


REQUESTS = [Request(i, [1], SamplingParams(), 0, frozenset(), 10) for i in range(2)]


def test_the_best_nodes_of_all_trees() -> None:
    combined = CombinedDrafter([Fixed([5, 6], -1.0), Fixed([5, 7, 8], -0.4)])
    for guesses in combined.propose(REQUESTS, limits(3)):
        tree = guesses.tree()
        assert sorted(tree.tokens) in ([5, 6, 7], [5, 7, 8])
        (first,) = follow(tree, [5])
        assert tree.scores[first] == -1.0  # the first drafter's


def test_everyone_is_told() -> None:
    drafters = [Fixed([1], -1.0), Fixed([2], -1.0)]
    combined = CombinedDrafter(drafters)
    combined.expect(REQUESTS)
    combined.verified(REQUESTS, Forest.of([Fixed([1, 2], -1.0)._tree(), Guesses()]))
    combined.commit(REQUESTS[1], [3, 4])
    combined.flush()
    combined.pause(REQUESTS[0])
    combined.close(REQUESTS[1])
    told = ["expect [0, 1]", "verified 2 of [0, 1]", "commit 1 [3, 4]", "flush", "pause 0", "close 1"]
    assert [d.told for d in drafters] == [told] * 2
