"""The sequences that a draft grows trees for, and their parts of a level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from pilotfish.core.cache.slots import NO_SLOTS, Slots
from pilotfish.core.drafting.mapped_text import MappedText
from pilotfish.core.drafting.messages import MAX_NODES, Open, Peer
from pilotfish.core.drafting.vocabulary_map import MappedVocabulary
from pilotfish.core.features.features import FeatureLog
from pilotfish.core.sampling.constraint import FollowedGrammar, GrammarSource, GrammarState, no_grammars
from pilotfish.core.sampling.logit_rules import LogitEdits, LogitRules
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import ANY_DEPTH
from pilotfish.core.trees.child_calibration import TenantCalibrations
from pilotfish.core.trees.lookahead import Lookahead, NewNodes
from pilotfish.core.trees.tree import Floats, Ints

#: Tokens of a target with another vocabulary for each that its draft can read, at most.
MOST_TO_ONE = 4


@dataclass(frozen=True)
class Unshared:
    """Token ids of a draft that its target lacks."""

    ids: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    first: int = 1 << 31  # and all from here on

    def mask(self, tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        beyond = tokens >= self.first
        return beyond | np.isin(tokens, self.ids) if len(self.ids) else beyond


@dataclass(frozen=True)
class SessionKey:
    target: Peer
    number: int


@dataclass
class DraftSession:
    """A sequence as the draft knows it.

    tokens   [ prompt ....... output ...... ]
    inputs   [ prompt ....... output ...... ]     the same, or as a draft with another vocabulary reads them
    slots    [ ===================== ]            those with KV here; while any is missing the tree does not grow

    Lengths that targets know, and positions of the noise, are those of the tokens. A trained head's rows need the
    target's features, so some of the missing tokens may have to wait for those.
    """

    key: SessionKey
    generation: int
    tenant: str
    salt: bytes | None  # a digest, as Open has it
    weight: float
    tokens: list[int]
    opened: int  # inputs at the Open
    max_length: int  # in tokens
    longest: int  # in inputs
    seed: int
    params: SamplingParams
    rules: LogitRules | None
    grammar: FollowedGrammar | None
    unshared: Unshared
    vocabulary: MappedVocabulary | None  # the target's; None: it is the draft's
    text: MappedText | None  # by it
    wanted: int  # nodes after which its tree stops growing
    touched: float  # when it was last opened or committed to
    read: float = 0.0  # when a level last read tokens of it
    slots: Slots = field(default_factory=lambda: NO_SLOTS)
    tree: Lookahead = field(default_factory=Lookahead)
    evicted: bool = False  # its KV went to another; rests until its next commit or, where it is parked, Resume
    parked: float | None = None  # when its target was told Pause, and to keep its commits back
    paused: bool = False  # its target has it rest
    pushes: int = 0
    features: FeatureLog | None = None  # of a trained head's

    @classmethod
    def of(
        cls,
        key: SessionKey,
        message: Open,
        tenant: str,
        weight: float,
        longest: int,
        unshared: Unshared,
        now: float,
        grammars: GrammarSource = no_grammars,
        feature_width: int = 0,
        vocabulary: MappedVocabulary | None = None,
    ) -> DraftSession:
        """A session of at most `longest` inputs; ParameterError for sampling parameters that no target takes.
        `feature_width` is that of a trained head, else 0."""
        params, constraint = message.sampling.params(), message.constraint
        output = message.tokens[message.prompt_tokens :]
        text = None if vocabulary is None else MappedText(vocabulary.map, message.tokens)
        grammars = grammars if vocabulary is None else vocabulary.grammars
        return cls(
            key,
            message.generation,
            tenant,
            message.salt,
            weight,
            list(message.tokens),
            len(message.tokens if text is None else text.inputs),
            min(message.max_length, longest if text is None else MOST_TO_ONE * longest),
            longest,
            message.seed,
            params,
            message.sampling.rules(params, message.tokens, message.prompt_tokens),
            None if constraint is None else FollowedGrammar(grammars(constraint), output),
            unshared,
            vocabulary,
            text,
            min(message.wanted, MAX_NODES),
            touched=now,
            features=FeatureLog(feature_width) if feature_width else None,
        )

    @property
    def inputs(self) -> list[int]:
        return self.tokens if self.text is None else self.text.inputs

    @property
    def num_missing(self) -> int:
        return len(self.inputs) - len(self.slots)

    @property
    def num_pending(self) -> int:
        """Of them, those whose rows can be computed now: the others wait for features. The first token has none, and
        goes with the second."""
        if self.features is None:
            return self.num_missing
        known = min(self.features.reach, len(self.tokens) - 1)
        return max(known + 1 - len(self.slots), 0) if known else 0

    @property
    def waits(self) -> bool:
        return self.num_missing > 0 and self.num_pending == 0

    @property
    def max_depth(self) -> int:
        return min(self.max_length - len(self.tokens), self.longest - len(self.inputs)) - 1

    def input_at(self, leaf: int) -> int:
        token = self.tree.token(leaf)
        return token if self.text is None else self.text.map.counterpart(token)

    @property
    def greedy(self) -> bool:
        return self.params.temperature == 0.0

    @property
    def root(self) -> str:
        """Names all that may share KV with it: its tenant's sessions of the same salt."""
        return f"{'' if self.salt is None else self.salt.hex()} {self.tenant}"

    def length_at(self, leaf: int) -> int:
        return len(self.tokens) + self.tree.depth(leaf)

    def edits_at(self, leaf: int) -> LogitEdits | None:
        """The target's edits of the logits after that node; None: they stay as they are."""
        return None if self.rules is None else self.rules.edits(self.tree.path_tokens(leaf))

    def grammar_state(self) -> GrammarState | None:
        """None where all may follow, as far as is known."""
        return None if self.grammar is None else self.grammar.state()


@dataclass(frozen=True)
class LevelPart:
    """A session's part of a level: its next pending tokens, or some of its leaves."""

    session: DraftSession
    pending: int  # rows of committed tokens
    leaves: Sequence[int]  # nodes; the root after the last pending token; none after a part of a prompt

    @classmethod
    def of_pending(cls, session: DraftSession, count: int) -> LevelPart:
        """The next `count` pending tokens, and the root where it is the last of them."""
        return cls(session, count, [session.tree.root] if count == session.num_missing else [])

    @property
    def rows(self) -> int:
        return self.pending or len(self.leaves)

    @property
    def new_rows(self) -> int:
        return self.pending or self.session.tree.lacking(self.leaves)


def add_children(
    level: Sequence[LevelPart],
    tokens: Ints,  # [leaves, children], likeliest first
    log_chances: Floats,  # likewise
    calibrations: TenantCalibrations,
    deepest: int = ANY_DEPTH,
) -> list[NewNodes]:
    """Hang children below all leaves of a level, in order; what was kept of each part. Those as deep as `deepest` are
    never expanded."""
    depths = np.array([part.session.tree.depth(leaf) + 1 for part in level for leaf in part.leaves], np.int64)
    greedy = np.array([part.session.greedy for part in level for _ in part.leaves], np.bool_)
    tenants = np.array([part.session.tenant for part in level for _ in part.leaves], np.str_)
    chances = np.minimum(calibrations.calibrated(tenants, greedy, depths, log_chances), 0.0)
    above = np.array([part.session.tree.score(leaf) for part in level for leaf in part.leaves])
    kept = above[:, None] + chances > Lookahead.FLOOR
    spans, largest = list(pairwise(accumulate((len(part.leaves) for part in level), initial=0))), tokens.max(initial=0)
    for part, (row, end) in zip(level, spans, strict=True):
        if len(part.session.unshared.ids) or largest >= part.session.unshared.first:
            kept[row:end] &= ~part.session.unshared.mask(tokens[row:end])
    counts, tokens_kept, chances_kept = kept.sum(axis=1).tolist(), tokens[kept].tolist(), chances[kept].tolist()
    added, first = [], 0
    for part, (row, end) in zip(level, spans, strict=True):
        own = slice(first, first := first + sum(counts[row:end]))
        session, nodes = part.session, (tokens_kept[own], chances_kept[own])
        added.append(session.tree.add(part.leaves, counts[row:end], *nodes, min(session.max_depth, deepest)))
    return added
