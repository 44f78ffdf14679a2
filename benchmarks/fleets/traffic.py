"""Requests of a simulated fleet: conversations drawn from measured distributions, or those of a recorded trace, as many
times as wanted. A prompt is a chain of runs (`core/cache/prefix_cache.py`), of which equal ones are equal prefixes.

    system prompt ─┬─ first message ─── output ─── second message      runs; each request's prompt ends with one,
                   └─ first message ─── …                              and its output is one more
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np

#: A run's name.
RunId = bytes


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    at: float  # when it arrives
    runs: tuple[RunId, ...]  # of its prompt
    ends: tuple[int, ...]  # tokens of the prompt up to the end of each
    output: int  # tokens, one at least
    output_run: RunId  # what its output is to later requests
    session: str

    @property
    def tokens(self) -> int:
        """Of its prompt."""
        return self.ends[-1]


def run_id(number: int) -> RunId:
    return number.to_bytes(8, "little")


@dataclass(frozen=True, kw_only=True)
class ConversationTraffic:
    """Conversations that begin at random (Poisson) with the system prompt of a tenant, of whom the i-th sends 1/i as
    many as the first. As many requests a second as `rate`, follow-ups included, once the first have gone on.

    Defaults are those of the conversations that Mooncake published (docs/benchmarks.md): lognormal lengths and times,
    the chance that a conversation goes on after so many turns, and what follows an output.
    """

    rate: float
    seconds: float
    seed: int = 0
    tenants: int = 1
    system_tokens: int = 512
    first_tokens: tuple[float, float] = (8.5, 1.26)  # mean and deviation of the logarithm, the system prompt aside
    output_tokens: tuple[float, float] = (5.6, 0.8)
    next_tokens: tuple[float, float] = (4.0, 2.0)  # of a message that follows an output
    pause: tuple[float, float] = (4.85, 0.85)  # seconds from a request to the next of its conversation
    goes_on: tuple[float, ...] = (0.31, 0.42, 0.51, 0.59, 0.6, 0.68, 0.75)  # after so many turns; the last, any later
    longest_prompt: int = 120_000
    longest_output: int = 2_000

    @property
    def turns(self) -> float:
        """Of a conversation, in the mean."""
        within = np.cumprod((1.0, *self.goes_on[:-1]))
        return float(within.sum() + within[-1] * self.goes_on[-1] / (1 - self.goes_on[-1]))

    def __iter__(self) -> Iterator[SimulatedRequest]:
        draw, names = np.random.default_rng(self.seed), count(self.tenants)
        often = 1 / np.arange(1, self.tenants + 1)
        shares = np.cumsum(often / often.sum())
        coming: list[tuple[float, int, SimulatedRequest, int]] = []
        begins = 0.0
        while True:
            begins += float(draw.exponential(self.turns / self.rate))
            while coming and coming[0][0] <= min(begins, self.seconds):
                _, _, request, turn = heapq.heappop(coming)
                yield request
                self._go_on(request, turn, draw, names, coming)
            if begins > self.seconds:
                return
            tenant = min(int(np.searchsorted(shares, draw.random())), self.tenants - 1)
            first = self.system_tokens + self._draw(draw, self.first_tokens, self.longest_prompt)
            runs, number = (run_id(tenant), run_id(next(names))), next(names)
            request = self._request(begins, runs, (self.system_tokens, first), draw, number, f"session-{number}")
            heapq.heappush(coming, (begins, number, request, 0))

    def _go_on(
        self,
        request: SimulatedRequest,
        turn: int,
        draw: np.random.Generator,
        names: count[int],
        coming: list[tuple[float, int, SimulatedRequest, int]],
    ) -> None:
        """The next request of its conversation, maybe."""
        longer = request.tokens + request.output + self._draw(draw, self.next_tokens, self.longest_prompt)
        if draw.random() >= self.goes_on[min(turn, len(self.goes_on) - 1)] or longer > self.longest_prompt:
            return
        at, number = request.at + float(draw.lognormal(*self.pause)), next(names)
        runs = (*request.runs, request.output_run, run_id(next(names)))
        ends = (*request.ends, request.tokens + request.output, longer)
        heapq.heappush(coming, (at, number, self._request(at, runs, ends, draw, number, request.session), turn + 1))

    def _request(
        self,
        at: float,
        runs: tuple[RunId, ...],
        ends: tuple[int, ...],
        draw: np.random.Generator,
        number: int,
        session: str,
    ) -> SimulatedRequest:
        output = self._draw(draw, self.output_tokens, self.longest_output)
        return SimulatedRequest(at, runs, ends, output, run_id(number), session)

    @staticmethod
    def _draw(draw: np.random.Generator, lognormal: tuple[float, float], most: int) -> int:
        return min(max(int(draw.lognormal(*lognormal)), 1), most)


@dataclass(frozen=True)
class RecordedRequest:
    """A request of a trace. Equal blocks are blocks that begin with equal prefixes."""

    at: float  # seconds since the trace began
    tokens: int
    output: int
    blocks: tuple[int, ...]


@dataclass
class RecordedTraffic:
    """A trace, `copies` times at once. A copy begins elsewhere in it, goes on with its beginning after its end, and has
    blocks of its own but for what all requests begin with; of a part of a copy so many conversations are taken."""

    trace: Sequence[RecordedRequest]
    copies: float
    seconds: float
    block_tokens: int
    seed: int = 0
    _requests: list[SimulatedRequest] = field(init=False)
    _conversations: list[int] = field(init=False)  # of each request, by its first request's place
    _shared: RunId | None = field(init=False)  # what all begin with

    def __post_init__(self) -> None:
        self._requests = runs_of(self.trace, self.block_tokens)
        self._conversations = conversations_of(self._requests)
        firsts = {request.runs[0] for request in self._requests}
        self._shared = firsts.pop() if len(firsts) == 1 else None

    @property
    def length(self) -> float:
        """Seconds, to the arrival of the last request and as long as between two of them."""
        last = self.trace[-1].at
        return last + last / max(len(self.trace) - 1, 1)

    def __iter__(self) -> Iterator[SimulatedRequest]:
        whole = int(self.copies)
        copies = [self._copy(number, 1.0) for number in range(whole)]
        if self.copies > whole:
            copies.append(self._copy(whole, self.copies - whole))
        return heapq.merge(*copies, key=lambda request: request.at)

    def _copy(self, number: int, share: float) -> Iterator[SimulatedRequest]:
        draw = np.random.default_rng((self.seed, number))
        taken = draw.random(len(self._requests)) < share  # by conversation
        turn, first = 0.0, int(draw.integers(len(self._requests))) if number else 0
        order, origin = [*range(first, len(self._requests)), *range(first)], self._requests[first].at
        while True:
            for place in order:
                one = self._requests[place]
                at = turn + (one.at - origin) % self.length
                if at > self.seconds:
                    return
                if taken[self._conversations[place]]:
                    yield self._own(place, at, number)
            turn, number = turn + self.length, number + (1 << 16)  # the next time all blocks are new

    def _own(self, place: int, at: float, number: int) -> SimulatedRequest:
        one, mark = self._requests[place], number.to_bytes(4, "little") if number else b""
        runs = tuple(run if run == self._shared else run + mark for run in one.runs)
        session = f"{number}-{self._conversations[place]}"
        return SimulatedRequest(at, runs, one.ends, one.output, one.output_run + mark, session)


def runs_of(trace: Sequence[RecordedRequest], block_tokens: int) -> list[SimulatedRequest]:
    """Requests whose runs are blocks that always came one after the other. Outputs are nobody's beginning: a trace does
    not say what they were."""
    followers: dict[int, set[int]] = {}
    ends: Counter[int] = Counter()  # requests that end with a block
    for one in trace:
        ends[one.blocks[-1]] += 1
        for block, after in zip(one.blocks, one.blocks[1:], strict=False):
            followers.setdefault(block, set()).add(after)
    first_output = 1 + max(block for one in trace for block in one.blocks)
    return [_of_runs(one, followers, ends, block_tokens, first_output + i) for i, one in enumerate(trace)]


def _of_runs(
    one: RecordedRequest, followers: dict[int, set[int]], ends: Counter[int], block_tokens: int, output: int
) -> SimulatedRequest:
    places = range(1, len(one.blocks) + 1)
    last = [i for i, block in zip(places, one.blocks, strict=True) if ends[block] or len(followers[block]) > 1]
    runs = tuple(run_id(one.blocks[place - 1]) for place in last)
    lengths = tuple(min(place * block_tokens, one.tokens) for place in last)
    return SimulatedRequest(one.at, runs, lengths, max(one.output, 1), run_id(output), "")


def conversations_of(requests: Sequence[SimulatedRequest]) -> list[int]:
    """For each request the place of the first one whose prompt it goes on with, beyond what all begin with."""
    begun: dict[RunId, int] = {}
    found = []
    for place, request in enumerate(requests):
        own = request.runs[1:] or request.runs
        first = next((begun[run] for run in reversed(own) if run in begun), place)
        begun.update(dict.fromkeys(own, first))
        found.append(first)
    return found
