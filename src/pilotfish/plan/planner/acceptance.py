from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from pilotfish.config.hardware.tables import Sourced, read_table
from pilotfish.errors import ParameterError
from pilotfish.plan.rounds import tokens_of_chain

#: Lengths of chains that are tried.
CHAINS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)


class GuessedTree(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    nodes: int  # verified, beside the last token
    levels: int  # forwards of the draft
    gained: float  # tokens a step beside the target's own


class PairAcceptance(Sourced, frozen=True, kw_only=True):
    """Either `rate` or `trees`."""

    rate: float | None = None  # of each guess of a chain
    trees: tuple[GuessedTree, ...] = ()
    range: tuple[float, float] | None = None  # of `rate`, by several sources
    basis: Literal["measured", "inverted", "carried", "given"] = "given"
    why: str = ""

    def __post_init__(self) -> None:
        if (self.rate is None) == (not self.trees):
            raise ParameterError("acceptance", self.rate, "either a rate of each guess or trees")
        if self.rate is not None and not 0 <= self.rate <= 1:
            raise ParameterError("acceptance", self.rate, "a rate from 0 to 1")
        for tree in self.trees:
            if not (1 <= tree.levels <= tree.nodes and 0 <= tree.gained <= tree.levels):
                raise ParameterError("acceptance", tree.gained, "no more levels than nodes, nor tokens than levels")

    @property
    def guesses(self) -> tuple[GuessedTree, ...]:
        if self.rate is None:
            return self.trees
        gains = ((guesses, tokens_of_chain(self.rate, guesses) - 1) for guesses in CHAINS)
        return tuple(GuessedTree(nodes=n, levels=n, gained=gained) for n, gained in gains)

    def scaled(self, factor: float) -> "PairAcceptance":
        if self.rate is not None:
            return replace(self, rate=min(self.rate * factor, 1.0))
        gains = [replace(tree, gained=min(tree.gained * factor, float(tree.levels))) for tree in self.trees]
        return replace(self, trees=tuple(gains))

    def filled(self, share: float) -> "PairAcceptance":
        if self.rate is not None:
            return replace(self, rate=share)
        return replace(self, trees=tuple(replace(tree, gained=share * tree.levels) for tree in self.trees))

    @property
    def figure(self) -> float:
        return self.trees[0].gained if self.rate is None else self.rate


PAIRS = read_table(__file__, "drafts", dict[str, dict[str, PairAcceptance]])


def published_acceptance(target: str, draft: str) -> PairAcceptance:
    known = PAIRS.get(target.lower(), {})
    if (found := known.get(draft.lower())) is None:
        others = f"one of {', '.join(known)}, or" if known else "a rate or trees:"
        raise ParameterError("draft", draft, f"{others} its acceptance by {target}; nothing published is known here")
    return found
