"""Suffix decoding: a tree of what followed the longest suffixes seen before (Oliaro et al. 2024, arXiv 2411.04975)."""

import heapq
import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain, islice
from typing import NamedTuple, TypeAlias

from pilotfish.core.drafting.drafter import Drafter, DraftLimits
from pilotfish.core.sampling.noise import gumbel_of
from pilotfish.core.scheduling.request import FinishReason, Request
from pilotfish.core.trees.tree import ROOT, SUFFIX, Guesses
from pilotfish.workers.automaton import Context, Match, SuffixAutomaton

MAX_TENANTS = 1024  # salts remembered at a time
MAX_MATCH = 32  # tokens that a match in past responses is searched for
LEAD = 4  # tokens of the prompt's end that are remembered before a response, so that its first token has a context
#: Contexts of one automaton that a guess is made from. A third made none better (same text as PRIOR).
MAX_CONTEXTS = 2
CHILDREN = 4  # children that a node gets, at most
#: log of the least chance that is worth a row: sixteen rows cost about a tenth more than one.
MIN_SCORE = math.log(0.01)
#: Occurrences that the next shorter context weighs beside a context of one token; n tokens divide it by n. Calibrated:
#: with 6 nodes were right about as often as their scores said, over Python source read at T = 0.
PRIOR = 6.0
#: exp of the noise's mean, Euler's constant: stands for the noise of all tokens without a count.
REST_NOISE = math.exp(0.5772156649015329)


class Responses:
    """A tenant's responses in two generations: a full young one replaces the old one, whose tokens are forgotten."""

    def __init__(self, max_tokens: int) -> None:
        self._room = max_tokens // 2  # of a generation
        self._old, self._young = SuffixAutomaton(), SuffixAutomaton()

    @property
    def num_tokens(self) -> int:
        return self._old.num_tokens + self._young.num_tokens

    @property
    def automata(self) -> tuple[SuffixAutomaton, ...]:
        return tuple(automaton for automaton in (self._old, self._young) if automaton.num_tokens)

    def add(self, tokens: Sequence[int]) -> None:
        if len(tokens) > self._room:
            return
        if self._young.num_tokens + len(tokens) > self._room:
            self._old, self._young = self._young, SuffixAutomaton()
        self._young.begin()
        self._young.extend(tokens)


class ResponseCache:
    """Responses by tenant: the salt of a request; without one nothing is remembered or looked up. Beyond
    `max_tokens` tokens or MAX_TENANTS tenants the tenant used longest ago is forgotten. So one tenant may fill the
    cache: others then see that it is busy, but learn nothing of its text."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._tenants: OrderedDict[str, Responses] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        return sum(tenant.num_tokens for tenant in self._tenants.values())

    def automata(self, salt: str | None) -> tuple[SuffixAutomaton, ...]:
        if salt is None or salt not in self._tenants:
            return ()
        self._tenants.move_to_end(salt)
        return self._tenants[salt].automata

    def add(self, salt: str | None, tokens: Sequence[int]) -> None:
        if salt is None:
            return
        self._tenants.setdefault(salt, Responses(self.max_tokens)).add(tokens)
        self._tenants.move_to_end(salt)
        while self.num_tokens > self.max_tokens or len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)


#: Where a path stands: in its tenant's automata and, last, in its request's own.
Cursors: TypeAlias = Sequence[tuple[SuffixAutomaton, Match]]


class _Leaf(NamedTuple):
    """A child that may join the tree. The likeliest is the least; ties to the older. `cursors` are its parent's."""

    cost: float  # less its score
    parent: int
    rank: int  # among its siblings
    token: int
    cursors: Cursors


def next_token_chances(contexts: Sequence[Context]) -> dict[int, float]:
    """Probabilities of the next token; what they lack to 1 is for tokens that no context knows. From the shortest to
    the longest context, a share is (times + prior * chance so far) / (times of all + prior): a hierarchical
    Dirichlet model (MacKay and Peto 1995). Of two contexts of one length the later weighs more."""
    chances: dict[int, float] = {}
    for context in sorted(contexts, key=lambda context: context.length):
        prior = PRIOR / context.length
        total = sum(context.followers.values()) + prior
        chances = {token: chance * prior / total for token, chance in chances.items()}
        for token, times in context.followers.items():
            chances[token] = chances.get(token, 0.0) + times / total
    return chances


def perturbed(chances: dict[int, float], request: Request, position: int) -> dict[int, float]:
    """Chances that each token is *sampled* at `position` under its known noise: proportional to chance * exp(g), as
    the target takes the arg max of log chance + g. Tokens without a count get the noise's mean."""
    weights = {t: chance * math.exp(gumbel_of(request.seed, position, t)) for t, chance in chances.items()}
    total = sum(weights.values()) + max(0.0, 1 - sum(chances.values())) * REST_NOISE
    return {token: weight / total for token, weight in weights.items()}


class SuffixDrafter(Drafter):
    """Grows a tree best-first from automata of the request's own tokens and its tenant's past responses. A child's
    chance at T = 0 is its share (temperature and filters are assumed to be in the text already), above it the share
    under the shared noise. A request that ends by itself leaves its output to its tenant."""

    def __init__(self, responses: ResponseCache) -> None:
        self.responses = responses
        self._own: dict[int, SuffixAutomaton] = {}

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[Guesses]:
        return [self._tree(request, limits.nodes) for request in requests]

    def close(self, request: Request) -> None:
        self._own.pop(request.id, None)
        if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.responses.add(request.cache_salt, request.tokens[max(0, request.num_prompt_tokens - LEAD) :])

    def _tree(self, request: Request, nodes: int) -> Guesses:
        tree, leaves = Guesses(), list[_Leaf]()
        node, cursors = ROOT, self._cursors(request)
        while len(tree) < nodes:
            for rank, (token, score) in enumerate(_children(request, tree, node, cursors)):
                heapq.heappush(leaves, _Leaf(-score, node, rank, token, cursors))
            if not leaves:
                break
            leaf = heapq.heappop(leaves)
            node = tree.add(leaf.parent, leaf.token, -leaf.cost, SUFFIX)
            cursors = [(automaton, automaton.follow(match, leaf.token)) for automaton, match in leaf.cursors]
        return tree

    def _cursors(self, request: Request) -> Cursors:
        own = self._own.setdefault(request.id, SuffixAutomaton())
        own.extend(request.tokens[own.num_tokens :])
        recent = request.tokens[-MAX_MATCH:]
        shared = self.responses.automata(request.cache_salt)
        return [*((each, each.match(recent)) for each in shared), (own, own.seen_before())]


def _children(request: Request, tree: Guesses, node: int, cursors: Cursors) -> list[tuple[int, float]]:
    found = (islice(automaton.contexts(match), MAX_CONTEXTS) for automaton, match in cursors)
    chances = next_token_chances(list(chain.from_iterable(found)))
    likeliest = heapq.nlargest(CHILDREN, chances, key=chances.__getitem__)
    chances = {token: chances[token] for token in likeliest}
    depth, above = (0, 0.0) if node == ROOT else (tree.depths[node], tree.scores[node])
    if not request.params.greedy:
        chances = perturbed(chances, request, len(request.tokens) + depth)
    scores = ((token, above + math.log(chance)) for token, chance in chances.items())
    return [(token, score) for token, score in scores if score >= MIN_SCORE]
