"""Requests: one sequence each, and the queue of those that wait."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from enum import StrEnum
from itertools import islice, takewhile

import numpy as np

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS
from pilotfish.core.cache.slots import GONE, Slots
from pilotfish.core.cache.tiers import KVLoad
from pilotfish.core.prefilling.handover import HandOver, HandOverReport
from pilotfish.core.sampling.constraint import GrammarState
from pilotfish.core.sampling.logit_rules import LogitRules
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.errors import ParameterError

MAX_SALT_LENGTH = 256


def check_cache_salt(salt: str | None) -> None:
    if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= MAX_SALT_LENGTH):
        raise ParameterError("cache_salt", salt, f"a string of 1 to {MAX_SALT_LENGTH} characters")


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"  # its logits are not finite: there is nothing to sample from


@dataclass
class RequestStats:
    """Depth d is at index d - 1 of the two lists."""

    verify_steps: int = 0
    preemptions: int = 0
    cached_by_tier: dict[str, int] = field(default_factory=dict)  # tokens whose KV was found when it was last admitted
    handovers: list[HandOverReport] = field(default_factory=list)  # that have ended
    draft_tokens: int = 0
    accepted_tokens: int = 0
    hits: int = 0  # verify steps whose tokens, the bonus token too, were in a tree that lives on
    offered_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    accepted_by_origin: dict[str, int] = field(default_factory=dict)  # by who guessed them

    @property
    def cached_tokens(self) -> int:
        return sum(self.cached_by_tier.values())

    def count(self, nodes: int, deepest: int, origins: Sequence[str]) -> None:
        accepted = len(origins)
        self.verify_steps += 1
        self.draft_tokens += nodes
        self.accepted_tokens += accepted
        for origin in origins:
            self.accepted_by_origin[origin] = self.accepted_by_origin.get(origin, 0) + 1
        for counts in (self.offered_by_depth, self.accepted_by_depth):
            counts.extend([0] * (deepest - len(counts)))
        for depth in range(deepest):
            self.offered_by_depth[depth] += 1
            self.accepted_by_depth[depth] += depth < accepted


@dataclass(eq=False, repr=False)
class Request:
    """Committed tokens, the slots of those that have KV, and why it ended.

    tokens   [ prompt ........ | output ...... ]
    slots    [ gone ... | ================= ]      0 <= num_gone <= num_computed < len(tokens) while it runs
    """

    id: int
    prompt: InitVar[Sequence[int]]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]
    room: InitVar[int]  # the context left for output
    bad_sequences: Sequence[Sequence[int]] = ()  # the ids of `params.bad_words`
    cache_salt: str | None = None  # the tenant
    max_nodes: int | None = None  # that a step verifies at most; 0: no speculation, None: as the drafter gives
    stop_detector: Callable[[int], bool] | None = None  # whether the next committed token completes a stop string
    group: int = -1  # requests of one share a prompt and compute its KV once; -1: nobody shares this one's
    grammar: GrammarState | None = None
    draft: str = ""  # the revision of drafts that may guess; "": any

    def __post_init__(self, prompt: Sequence[int], room: int) -> None:
        self.rules = LogitRules.of(self.params, prompt, self.stop_ids, self.bad_sequences)
        self.group = self.id if self.group == -1 else self.group
        self.num_prompt_tokens = len(prompt)
        #: Tokens that it can reach, prompt included.
        self.max_length = len(prompt) + min(self.params.max_tokens, room)
        self.tokens = list(prompt)
        self.num_computed = 0
        self.num_gone = 0  # first tokens whose slots it has given back, or never had: no row of it will see them
        self.reserved = False  # whether the most slots that it can need are kept for it while it runs
        self.passed_over = 0  # how many that came later were admitted before it
        self.num_scored = 0  # rows of the prompt that have given the log-probability of the token after them
        self.slots: Slots = np.zeros(self.max_length, dtype=np.int32)
        self.load: KVLoad | HandOver | None = None  # of KV from elsewhere; it gets no rows meanwhile
        self.admitted: float | None = None  # when it first was
        self.finish_reason: FinishReason | None = None
        self.stats = RequestStats()

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def num_held(self) -> int:
        return self.num_computed - self.num_gone + (0 if self.load is None else len(self.load.slots))

    @property
    def held(self) -> Slots:
        return self.slots[self.num_gone : self.num_computed]

    @property
    def num_remaining(self) -> int:
        return self.max_length - len(self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    def extend(self, tokens: Sequence[int]) -> list[int]:
        committed: list[int] = []
        for token in tokens:
            self.tokens.append(token)
            committed.append(token)
            if self.grammar is not None:
                self.grammar.extend(token)
            self.finish_reason = self._reason_to_finish(token)
            if self.finish_reason is not None:
                break
        if self.rules is not None:
            self.rules.extend(committed)
        return committed

    @property
    def num_shareable(self) -> int:
        """First tokens whose KV its group may give: of the prompt without the last; none while it is scored."""
        if self.params.prompt_logprobs is not None and self.num_scored < self.num_prompt_tokens - 1:
            return 0
        return min(self.num_prompt_tokens, len(self.tokens) - 1)

    def to_score(self, count: int) -> range:
        """Of the next `count` tokens without KV, those whose rows score the next prompt token, once each."""
        if self.params.prompt_logprobs is None:
            return range(0)
        first = max(self.num_computed, self.num_scored)
        return range(first, max(first, min(self.num_computed + count, self.num_prompt_tokens - 1)))

    def _reason_to_finish(self, token: int) -> FinishReason | None:
        completes_stop = self.stop_detector is not None and self.stop_detector(token)
        whole = self.grammar is not None and self.grammar.ended
        if completes_stop or token in self.stop_ids or whole:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_remaining == 0 else None

    def end_load(self) -> Slots:
        """Take the KV that its load has brought; slots that it leaves."""
        assert self.load is not None and self.load.count is not None
        ended, self.load = self.load, None
        self.add_slots(ended.slots[: ended.count])
        if isinstance(ended, HandOver):
            self.stats.handovers.append(ended.report)
        else:
            self.stats.cached_by_tier |= ended.count_by_tier()
        return ended.slots[ended.count :]

    def add_slots(self, slots: Slots) -> None:
        """The next tokens without KV have it in these slots. Some may be gone if they are the first."""
        self.slots[self.num_computed : self.num_computed + len(slots)] = slots
        if not self.num_computed:
            self.num_gone = int(np.count_nonzero(slots == GONE))
        self.num_computed += len(slots)

    def give_back(self, first: int) -> Slots:
        given = self.slots[self.num_gone : first].copy()
        self.slots[self.num_gone : first] = GONE
        self.num_gone = max(self.num_gone, first)
        return given

    def restart(self) -> None:
        self.num_computed = self.num_gone = 0
        self.stats.preemptions += 1


#: The first in the queue: one of them may be admitted before the others, and how often one may be passed over.
CANDIDATES, MAX_PASSED_OVER = 16, 8


class WaitingRequests:
    """In order of arrival, but of the first few the one with most KV in the cache; the oldest if that makes little
    difference, or it has come back, or was passed over often enough."""

    def __init__(self, num_known: Callable[[Request], int] | None) -> None:
        """`num_known`: tokens of a request with KV in the cache; None where nothing is kept."""
        self._num_known = num_known
        self._queue: deque[Request] = deque()
        self._next: Request | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._queue)

    def add(self, request: Request) -> None:
        self._queue.append(request)

    def put_first(self, request: Request) -> None:
        self._queue.appendleft(request)
        self._next = None

    def next(self) -> Request:
        """The same one until it is taken or removed, or another is put first. The queue must not be empty."""
        self._next = self._next or self._choose()
        return self._next

    def take(self, request: Request) -> None:
        for other in takewhile(lambda other: other is not request, self._queue):
            other.passed_over += 1
        self.remove(request)

    def remove(self, request: Request) -> None:
        self._queue.remove(request)
        self._next = None

    def _choose(self) -> Request:
        oldest = self._queue[0]
        if self._num_known is None or oldest.stats.preemptions or oldest.passed_over == MAX_PASSED_OVER:
            return oldest
        known = {request: self._num_known(request) for request in islice(self._queue, CANDIDATES)}
        best = max(known, key=lambda request: known[request])
        return best if known[best] >= known[oldest] + OBJECT_TOKENS else oldest
