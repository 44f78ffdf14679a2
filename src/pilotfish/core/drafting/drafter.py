"""A target's view of a draft, of no draft, and of several drafts as one."""

from collections.abc import Sequence
from dataclasses import dataclass

from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.tree import Forest, Guesses


@dataclass(frozen=True)
class DraftLimits:
    nodes: int  # of one tree
    total: int  # of all trees: nodes that are not among so many best will not be verified
    levels: int  # forwards of a draft model; 0: only guesses that cost none
    price: float  # tokens a second that the time of one more level would give otherwise
    trial: bool = False  # of another effort than the one that is chosen


NO_GUESSES = DraftLimits(0, 0, 0, 0.0)


class Drafter:
    """Guesses what comes next; no answer changes an output."""

    computes = False  # whether `propose` takes forwards here

    @property
    def levels(self) -> int:
        return 0

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[Guesses]:
        """A tree below each request's last committed token; an empty one is always right."""
        raise NotImplementedError

    def expect(self, requests: Sequence[Request]) -> None:
        """These were admitted, and will be proposed for once their KV is there, perhaps at once."""

    def verified(self, requests: Sequence[Request], trees: Forest) -> None:
        """A step has verified these trees, one of each request; its commits come next."""

    def commit(self, request: Request, tokens: Sequence[int]) -> bool:  # noqa: ARG002
        """Re-root after `tokens`; whether all were in a tree that lives on, False if it guesses only when asked."""
        return False

    def gather(self) -> None:
        """All commits of a step were told. Read now what the target's device has for them: soon it is busy."""

    def flush(self) -> None:
        """Send what was told: nobody waits."""

    def pause(self, request: Request) -> None:
        """It lost its KV, and may be proposed for later: free costly state."""
        self.close(request)

    def close(self, request: Request) -> None:
        """Free the state of an ended request; also called for requests never proposed for."""


class NoDrafter(Drafter):
    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[Guesses]:  # noqa: ARG002
        return [Guesses() for _ in requests]


def drafters_of(drafter: Drafter) -> Sequence[Drafter]:
    return drafter.drafters if isinstance(drafter, CombinedDrafter) else [drafter]


class CombinedDrafter(Drafter):
    """Merges trees and keeps the best nodes. Where paths meet the first drafter's score and name hold."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self.drafters = drafters
        self.computes = any(drafter.computes for drafter in drafters)

    @property
    def levels(self) -> int:
        return max(drafter.levels for drafter in self.drafters)

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[Guesses]:
        proposals, merged = [drafter.propose(requests, limits) for drafter in self.drafters], list[Guesses]()
        for tree, *others in zip(*proposals, strict=True):
            for other in others:
                tree.merge(other)
            merged.append(tree.best(limits.nodes))
        return merged

    def expect(self, requests: Sequence[Request]) -> None:
        for drafter in self.drafters:
            drafter.expect(requests)

    def verified(self, requests: Sequence[Request], trees: Forest) -> None:
        for drafter in self.drafters:
            drafter.verified(requests, trees)

    def commit(self, request: Request, tokens: Sequence[int]) -> bool:
        hits = [drafter.commit(request, tokens) for drafter in self.drafters]  # each must hear of it
        return any(hits)

    def gather(self) -> None:
        for drafter in self.drafters:
            drafter.gather()

    def flush(self) -> None:
        for drafter in self.drafters:
            drafter.flush()

    def pause(self, request: Request) -> None:
        for drafter in self.drafters:
            drafter.pause(request)

    def close(self, request: Request) -> None:
        for drafter in self.drafters:
            drafter.close(request)
