"""One step of the target: its rows, and its additions to each request. Records made several times a step are msgspec
structs, as those are made ten times as fast as frozen dataclasses."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise

import numpy as np
from msgspec import Struct, structs

from pilotfish.core.cache.slots import NO_SLOTS, Slots
from pilotfish.core.sampling.constraint import MaskedPaths, MaskMaker
from pilotfish.core.sampling.logit_rules import LogitEdits
from pilotfish.core.scheduling.executor import NO_NODES, NodeRows, Sampling, SequenceRows, TokenLogprobs, TokenMasks
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.tree import ROOT, Forest, Guesses, Ints


@dataclass(frozen=True)
class RowCosts:
    scored: float = 1.0  # one that scores a token of a prompt

    def of(self, request: Request, count: int) -> float:
        return count + (self.scored - 1) * len(request.to_score(count))

    def most(self, request: Request, room: float) -> int:
        most = min(request.num_pending, int(room))
        if not request.to_score(most):
            return most
        return bisect_right(range(1, most + 1), room, key=lambda count: self.of(request, count))


PLAIN_COSTS = RowCosts()  # of a model whose output embedding costs nothing


class RowBudget:
    """One for each request first, so that a long prompt delays nobody's next token; the rest in order of arrival.
    Rows that score a prompt count for their cost: only the first request with such rows is sure of one."""

    def __init__(self, rows: int, requests: int, costs: RowCosts) -> None:
        self._costs = costs
        self._left = float(rows - requests)
        self._scores = False  # whether a request has taken rows that score

    def take(self, request: Request) -> int:
        count = self._costs.most(request, 1 + self._left) or int(not self._scores)
        self._scores |= bool(request.to_score(count))
        self._left = max(self._left + 1 - self._costs.of(request, count), 0.0)
        return count


class Chunk(Struct, frozen=True):
    """Tokens [num_computed, num_computed + count) of a request, chosen for a step."""

    request: Request
    count: int
    #: The request of the same prompt whose last row in this step samples the first token of this one too.
    forked_from: Request | None = None

    @property
    def complete(self) -> bool:
        return self.count == self.request.num_pending

    @property
    def samples(self) -> bool:
        return self.complete or self.forked_from is not None


@dataclass(frozen=True)
class StepPlan:
    chunks: list[Chunk]
    preempted: list[Request]  # back in the queue, without KV: state kept for them elsewhere can go
    admitted: list[Request]  # to run from now on


@dataclass(frozen=True)
class Step:
    chunks: list[Chunk]
    samples: list[bool]  # [chunks], whether the last row of the chunk and every node of its tree give a token
    scored: list[range]  # [chunks], indices of prompt tokens whose rows score the token that follows
    slots: list[Slots]  # [chunks], of the chunks' tokens; of a forked one's whole prompt, where some may be gone
    forest: Forest  # a tree for each chunk that samples
    node_slots: Slots  # [nodes]

    @property
    def num_rows(self) -> int:
        return sum(chunk.count for chunk in self.chunks) + len(self.forest)

    @property
    def num_samples(self) -> int:
        return self.forest.num_trees + len(self.forest)

    @property
    def requests(self) -> list[Request]:
        return [chunk.request for chunk, samples in zip(self.chunks, self.samples, strict=True) if samples]

    @property
    def plain(self) -> bool:
        """Whether each chunk gets one token, which nothing but its parameters, seed and position draws."""
        free = all(r.grammar is None and r.rules is None and r.params.logprobs is None for r in self.requests)
        return free and all(self.samples) and self._all_sample and not len(self.forest)

    def following(self, chunks: list[Chunk], places: list[int], slots: list[Slots]) -> "Step":
        """A token more of each chunk at `places`, in `slots`, before it is known what this step gives."""
        before = [(self.chunks[place].request.held, self.slots[place]) for place in places]
        prefixes = [np.concatenate((*held, own)) for held, own in zip(before, slots, strict=True)]
        no_trees = Forest.of([Guesses() for _ in chunks])
        each = [True] * len(chunks), [range(0)] * len(chunks), slots, no_trees, NO_SLOTS
        return FollowingStep(chunks, *each, places, prefixes)

    def rows(self) -> list[SequenceRows]:
        nodes, spans = NodeRows.of(self.forest.nodes, self.node_slots), pairwise(self.forest.starts.tolist())
        rows = []
        for chunk, samples, scored, slots in zip(self.chunks, self.samples, self.scored, self.slots, strict=True):
            if chunk.forked_from is not None:
                next(spans)
                continue
            request, begin = chunk.request, chunk.request.num_computed
            kept = [*(index - begin for index in scored), *([chunk.count - 1] if samples else [])]
            prefix = np.concatenate((request.slots[:begin], slots))
            prefix[: request.num_gone] = 0  # any slot: nothing in it is read
            tokens = request.tokens[begin : begin + chunk.count]
            rows.append(SequenceRows(begin, tokens, prefix, nodes.span(*next(spans)) if samples else NO_NODES, kept))
        return rows

    def sampling(self) -> Sampling:
        """A sample after each root and each node: a tree's root, its nodes, the next tree's root."""
        requests, forest = self.requests, self.forest
        sequences = np.arange(forest.num_trees)
        positions = np.array([len(request.tokens) for request in requests], np.int64)
        if len(forest):
            sequences = np.repeat(sequences, forest.sizes + 1)
            positions = positions[sequences]
            positions[np.arange(len(forest)) + forest.owners + 1] += forest.nodes.depths
        params, seeds = [request.params for request in requests], [request.seed for request in requests]
        rows = None if self._all_sample else self.sample_rows
        return Sampling(rows, params, seeds, sequences, positions, self._edits(requests))

    def masks(self, maker: MaskMaker, vocab_size: int) -> TokenMasks | None:
        if all(request.grammar is None for request in self.requests):
            return None
        samples, paths = list[int](), list[MaskedPaths]()
        for tree, (first, end) in enumerate(pairwise(self.forest.starts.tolist())):
            if (state := self.requests[tree].grammar) is not None:
                samples += range(first + tree, end + tree + 1)
                paths.append(MaskedPaths(state, [self.forest.nodes.path_tokens(n) for n in (ROOT, *range(first, end))]))
        return TokenMasks(np.array(samples), partial(maker, paths, vocab_size))

    def _edits(self, requests: Sequence[Request]) -> list[LogitEdits | None]:
        if all(request.rules is None for request in requests):
            return []
        edits: list[LogitEdits | None] = []
        for request, (first, end) in zip(requests, pairwise(self.forest.starts.tolist()), strict=True):
            if request.rules is None:
                edits += [None] * (1 + end - first)
            else:
                paths = (self.forest.nodes.path_tokens(node) for node in (ROOT, *range(first, end)))
                edits += [request.rules.edits(path) for path in paths]
        return edits

    @cached_property
    def sample_rows(self) -> Ints:
        """Kept rows that sample. [num_samples]"""
        if self._all_sample:
            return np.arange(self.num_samples)
        counts = self.forest.sizes + 1
        offsets: Ints = self._first_sample_rows[self.samples] - (np.cumsum(counts) - counts)
        rows: Ints = np.arange(self.num_samples) + np.repeat(offsets, counts)
        return rows

    def scoring_rows(self) -> dict[int, range]:
        """Kept rows that score prompt tokens, by request id, where there are any."""
        if not any(self.scored):
            return {}
        entries = zip(self.chunks, self.scored, self._first_sample_rows.tolist(), strict=True)
        return {chunk.request.id: range(end - len(scored), end) for chunk, scored, end in entries if scored}

    @property
    def _all_sample(self) -> bool:
        return not any(self.scored) and not self._forked

    @cached_property
    def _first_sample_rows(self) -> Ints:
        """The kept row that samples first in each chunk, after those that score. [chunks]"""
        counts = np.zeros(len(self.chunks), np.int64)
        counts[self.samples] = self.forest.sizes + 1
        forked = self._forked
        counts[forked] = 0  # they have no rows
        scored = np.array([len(scored) for scored in self.scored], np.int64)
        first: Ints = np.cumsum(scored) + np.cumsum(counts) - counts
        if forked:
            places = {chunk.request.id: place for place, chunk in enumerate(self.chunks)}
            first[forked] = first[[places[c.forked_from.id] for c in self.chunks if c.forked_from is not None]]
        return first

    @cached_property
    def _forked(self) -> list[int]:
        return [place for place, chunk in enumerate(self.chunks) if chunk.forked_from is not None]


@dataclass(frozen=True)
class FollowingStep(Step):
    places: list[int]  # [chunks], in the step before
    prefixes: list[Slots]  # [chunks], its own row's included

    def rows(self) -> list[SequenceRows]:
        each = zip(self.places, self.prefixes, strict=True)
        return [SequenceRows(len(prefix) - 1, [-1 - place], prefix, NO_NODES, [0]) for place, prefix in each]

    def sampling(self) -> Sampling:
        sampling = super().sampling()
        return structs.replace(sampling, positions=sampling.positions + 1)


class RequestCommit(Struct, frozen=True):
    """A step's tokens for one request. The draft guessed all but the last."""

    request: Request
    tokens: list[int] = []  # none where only prompt tokens were scored, or it failed
    path: list[int] = []  # nodes of the step's forest that guessed the first of `tokens`
    origins: list[str] = []  # [path]
    samples: list[int] = []  # [tokens], which of the step's samples each token is
    scored: range = range(0)  # indices of prompt tokens whose rows scored the token that follows
    nodes: int = 0  # of its tree, that were verified
    depth: int = 0  # of the deepest of them
    late: bool = False  # whether its drafter was asked for a tree and had none
    sharing: int = 0  # the sequences among which its step shared out guesses; 0: none were asked for
    logprobs: Sequence[TokenLogprobs] = ()  # of `tokens`, where the request asks for them
    prompt_logprobs: Sequence[TokenLogprobs] = ()  # of the prompt tokens after `scored`

    @property
    def accepted(self) -> int:
        return len(self.origins)
