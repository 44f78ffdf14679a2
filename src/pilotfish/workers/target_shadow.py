"""The would-be target of a shadow: the loop, scheduler and budget of a live one, over requests that have ended.

    step loop ── ended, observe: put down ──► │ turn: take in │ end the step that is due │ begin the next ──► when
                                              │   drafter: propose, commit, close, at the times of live steps

Nothing of it is verified and it gets no row: its owner calls `turn` beside the step loop. It has no socket, clock or
lock: time is an argument, and a remote draft is told through the drafter."""

import hashlib
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from msgspec import Struct, field

from pilotfish.core.cache.prefix_cache import PrefixCache
from pilotfish.core.cache.slots import SlotPool
from pilotfish.core.drafting.drafter import CombinedDrafter, Drafter, DraftLimits
from pilotfish.core.sampling.constraint import GrammarSource, PendingGrammar, no_grammars
from pilotfish.core.scheduling.budget import Budget
from pilotfish.core.scheduling.calibration import RecentMean, RecentRate, StepCosts
from pilotfish.core.scheduling.executor import Executor, ForwardSeconds, Outcome
from pilotfish.core.scheduling.request import FinishReason, Request
from pilotfish.core.scheduling.scheduler import Scheduler
from pilotfish.core.scheduling.step import RequestCommit, Step
from pilotfish.core.trees.tree import NO_TOKEN, Guesses, Ints
from pilotfish.workers.records import StepRecord
from pilotfish.workers.target import BegunStep, TargetWorker

DEPTHS = 8  # depths that are told apart; nodes below the last of them are in the sums alone


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

    def add(self, commits: Sequence[RequestCommit], hits: int) -> None:
        self.hits += hits
        for commit in commits:
            if commit.tokens:
                self.steps += 1
                self.tokens += len(commit.tokens)
                self.accepted += commit.accepted
            if commit.nodes:
                self.trees += 1
                for depth in range(min(commit.depth, DEPTHS)):
                    self.tried_by_depth[depth] += commit.accepted >= depth
                    self.accepted_by_depth[depth] += commit.accepted > depth


#: Steps, and requests that have ended, that wait to be taken in; the oldest give way.
MAX_STEPS, MAX_ENDED = 1 << 12, 1 << 10
MAX_WAITING = 1 << 19  # tokens of requests that wait to be followed; later ones are left out


class LiveSteps:
    """Live steps as shadows know them: sequences in one, its seconds by rows, and the loop's own share of those."""

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self.speed = RecentRate()
        self.loop = RecentMean()  # seconds of a step outside its forward and the draft's
        self._modelled = RecentRate()
        self._sequences = RecentMean()
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)

    def observe(self, step: StepRecord) -> None:
        """From the step loop's thread."""
        self._steps.append(step)

    def take_in(self) -> None:
        while self._steps:
            self._learn(self._steps.popleft())

    @property
    def sequences(self) -> int:
        return max(round(self._sequences.value), 1)

    @property
    def error(self) -> float:
        """The modelled rate of live steps over the measured one, less 1; 0 before the first step."""
        return self._modelled.value / self.speed.value - 1 if self.speed.value else 0.0

    def _learn(self, step: StepRecord) -> None:
        """Its time counts only if it decodes alone, right after another: prompts and pauses take theirs."""
        if step.sequences:
            self._sequences.add(step.sequences)
        waited, own = step.began - step.before, step.ended - step.began
        if not decodes(step) or waited > own:
            return
        drafting = step.drafted - step.planned
        self.speed.add(step.committed, step.sequences * (waited + own))
        self._modelled.add(step.committed, step.sequences * (self.costs.at(step.rows) + drafting))
        self.costs.observe(step.rows, waited + own - drafting)
        self.loop.add((step.planned - step.began) + (step.scheduled - step.drafted) + (step.ended - step.verified))


def decodes(step: StepRecord) -> bool:
    """Whether its rows are last tokens and their trees alone."""
    return 0 < step.sequences == step.rows - step.nodes


@dataclass(frozen=True)
class ShadowSetup:
    slots: int  # of KV
    max_rows: int
    max_requests: int
    window: int = 0  # of every layer, as in SlotPool
    prefix_cache: bool = False
    share: float = 1.0  # of the requests that are followed


class ShadowMachine:
    """Scores a draft that guesses beside the live one, or where there is none.

    No draft changes a token. So once a request has ended, the commit of a step over any tree is known, and a shadow can
    be told of the request then, at the steps that would have been its own:

        live     ├── 1 ──┼── 2 ──┼── 1 ──┼── 1 ──┼── 1 ──┤ ended
        shadow                                             Open ├── 1 ──┼── 3 ──┼── 2 ──┤  tokens that a step commits
                                                                its tree as of each step's beginning, late or not

    At the live steps' rhythm its trees would be deeper than they would be live: up to 140 % too many tokens a step in
    simulations where a level takes half of a step; here about 1 % (docs/shadow.md). Each step takes as long as live
    steps of as many rows, plus the longer work of its own loop for the trees."""

    def __init__(
        self,
        executor: Executor,
        drafter: Drafter,
        beside: Sequence[Drafter],
        budget: Budget,
        live: LiveSteps,
        setup: ShadowSetup,
        grammars: GrammarSource = no_grammars,
        cpu_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """Of `executor` only the vocabulary is used. `drafter` is scored; those `beside` it guess too."""
        self.score = ShadowScore()  # another record after each step: any thread may read it
        self._share, self._live, self._grammars, self._cpu = setup.share, live, grammars, cpu_seconds
        self._sums, self._speed = ShadowScore(), RecentRate()  # of a sequence
        self._time = 0.0  # of would-be steps: it stands still between them
        pool = SlotPool(setup.slots, setup.window)
        cache = PrefixCache(pool) if setup.prefix_cache else None
        scheduler = Scheduler(pool, setup.max_rows, setup.max_requests, cache)
        drafters = CombinedDrafter([_LateDrafter(drafter, self._sums), *beside])
        self._worker = TargetWorker(executor, scheduler, drafters, budget, lambda: self._time)
        self._ended: deque[Request] = deque(maxlen=MAX_ENDED)
        self._waiting: deque[_EndedRequest] = deque()
        self._waiting_tokens = 0
        self._known: dict[int, Sequence[int]] = {}  # tokens of those that are followed now, by id
        self._begun: BegunStep | None = None
        self._seconds = 0.0  # of the present one
        self._loop = RecentMean()  # CPU seconds of this machine's loop for one
        self._beginning = 0.0  # of them, for the beginning of the present one
        self._due = -math.inf  # when it ends, in real time

    def ended(self, request: Request) -> None:
        """From the step loop's thread. Nobody may change the request from now on."""
        self._ended.append(request)

    def turn(self, now: float, ready: bool = True) -> float:
        """End the step that is due, begin the next; when to call again, infinity if there is nothing to do. Further
        requests are followed while the draft is `ready`."""
        self._take_in()
        if self._begun is not None:
            if now < self._due:
                return self._due
            self._end(self._begun)
        if ready:
            self._follow()
        return self._begin(now)

    def _take_in(self) -> None:
        while self._ended:
            request = self._ended.popleft()
            count, whole = len(request.tokens), request.finish_reason is not FinishReason.ERROR
            followed = whole and bool(request.output) and in_share(request.id, self._share)
            if followed and self._waiting_tokens + count <= MAX_WAITING:
                self._waiting_tokens += count
                constraint = request.params.structured_outputs
                grammar = None if constraint is None else self._grammars(constraint)
                self._waiting.append(_EndedRequest(request, grammar))

    def _follow(self) -> None:
        """As many at a time as run live, or the draft would have less to do."""
        most = min(self._live.sequences, self._worker.scheduler.max_requests)
        if not self._known and len(self._waiting) < 2 * most - 1:
            return
        while self._waiting and len(self._known) < most:
            ended = self._waiting.popleft()
            self._waiting_tokens -= len(ended.request.tokens)
            if (request := ended.from_beginning()) is not None:
                self._known[request.id] = ended.request.tokens
                self._sums.requests += 1
                self._worker.scheduler.add(request)

    def _begin(self, now: float) -> float:
        began = self._cpu()
        begun = self._begun = self._worker.begin() if self._known else None
        if begun is None:
            return math.inf
        self._worker.drafter.flush()
        self._beginning = self._cpu() - began
        own = max(self._loop.value - self._live.loop.value, 0.0)  # trees, where live steps have none
        self._seconds = self._live.costs.at(begun.step.num_rows) + own
        kept_up = now - self._due < self._seconds  # a call that is a little late keeps the pace
        self._due = (self._due if kept_up else now) + self._seconds
        return self._due

    def _end(self, begun: BegunStep) -> None:
        began = self._cpu()
        self._begun, self._time = None, self._time + self._seconds
        tokens = known_tokens(begun.step, self._known)
        commits = self._worker.end(begun, Outcome(tokens, seconds=ForwardSeconds(model=self._seconds)))
        self._loop.add(self._beginning + self._cpu() - began)
        step = self._worker.last_step
        assert step is not None  # it has just ended
        self._sums.add(commits, step.hits)
        if decodes(step) and step.sequences >= self._live.sequences:
            self._speed.add(step.committed, step.sequences * self._seconds)
        self._sums.tokens_per_second = self._speed.value
        self.score = deepcopy(self._sums)
        for commit in commits:
            self._forget_ended(commit)

    def _forget_ended(self, commit: RequestCommit) -> None:
        """A request that goes on by its tokens may have ended: by a stop string, or aborted."""
        request = commit.request
        if request.finish_reason is not None or len(request.tokens) == len(self._known[request.id]):
            self._worker.abort(request)
            del self._known[request.id]


@dataclass(frozen=True)
class _EndedRequest:
    request: Request
    grammar: PendingGrammar | None  # of its output, from the beginning

    def from_beginning(self) -> Request | None:
        """As before its first token, allowed any guesses. None where its grammar is not at hand."""
        grammar = None if self.grammar is None else self.grammar()
        if self.grammar is not None and grammar is None:
            return None
        ended = self.request
        prompt, room = ended.tokens[: ended.num_prompt_tokens], ended.max_length - ended.num_prompt_tokens
        params = replace(ended.params, logprobs=None, prompt_logprobs=None)  # which nobody gives
        limits = (ended.stop_ids, room, ended.bad_sequences, ended.cache_salt)
        return Request(ended.id, prompt, params, ended.seed, *limits, grammar=grammar)


class _LateDrafter(CombinedDrafter):
    def __init__(self, drafter: Drafter, sums: ShadowScore) -> None:
        super().__init__([drafter])
        self._sums = sums

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[Guesses]:
        trees = super().propose(requests, limits)
        self._sums.late += sum(not len(tree) for tree in trees)
        return trees
