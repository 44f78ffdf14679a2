import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from msgspec.structs import replace

from pilotfish.core.routing.router import Route
from pilotfish.wire.serving import Delta, EngineRequest, PartialOutput, StepReport, Submit


@dataclass(frozen=True)
class Update:
    index: int  # of the output, counted through all prompts
    delta: Delta
    steps: tuple[StepReport, ...]


class Updates(Protocol):
    async def __anext__(self) -> Update: ...

    def abort(self) -> None: ...

    def revise(self, max_nodes: int | None, /) -> None: ...


Submits: TypeAlias = Callable[[Sequence[EngineRequest]], Updates]  # gives an engine a request
#: What a delta adds to its output.
ADDED = ("tokens", "text", "ends", "verified", "logprobs", "prompt_logprobs", "handovers")


def joined(first: Delta, later: Delta) -> Delta:
    sums = {name: getattr(first, name) + getattr(later, name) for name in ADDED}
    begin = first if first.tokens else later  # `seed`, `queued`, `cached` and `pool` come with the first tokens
    return replace(begin, **sums, finish=later.finish)


def merged(first: Update, later: Update) -> Update:
    return Update(first.index, joined(first.delta, later.delta), (*first.steps, *later.steps))


class Stream:
    """After the updates the iterator raises InputError if the target refused the request, TargetUnavailable if the
    target is gone, EngineError if a step broke. A slow reader costs no more memory than the outputs."""

    def __init__(self, prompts: int, n: int, abort: Callable[[], None]) -> None:
        """`abort` ends the request; the target frees its slots before the next step. Idempotent, never waits."""
        self.abort = abort
        self.revise: Callable[[int | None], None] = lambda _: None  # sets the most nodes of its trees
        self.open = prompts * n  # outputs that have not ended
        self._n = n
        self._updates: dict[int, Update] = {}  # by output, in the order of their arrival
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def __aiter__(self) -> "Stream":
        return self

    async def __anext__(self) -> Update:
        while not self._updates:
            if self._error is not None:
                raise self._error
            if not self.open:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        return self._updates.pop(next(iter(self._updates)))

    # -- the engine's side, in the event loop's thread

    def add(self, prompt: int, delta: Delta, step: StepReport) -> None:
        index = prompt * self._n + delta.index
        update, before = Update(index, delta, (step,)), self._updates.get(index)
        self._updates[index] = update if before is None else merged(before, update)
        self.open -= delta.finish is not None
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self.open = 0
        self._error = error
        self._changed.set()


@dataclass(eq=False)
class OpenRequest:
    stream: Stream
    place: int  # of the prompt in the stream
    request: EngineRequest  # its parameters have a seed, with which any target can go on
    withdrawn: bool = False  # it failed, or was aborted
    fingerprint: str = ""  # of the target that had it last
    losses: int = 0  # targets that ended, or were cut off, while they had it
    deadline: float | None = None  # while it waits for a target
    route: Route | None = None  # to the target that has it

    def __post_init__(self) -> None:
        self._outputs = [PartialOutput(index) for index in range(self.request.params.n)]  # as far as they came
        self._ended = set[int]()  # indices of those that have

    @property
    def begun(self) -> bool:
        """Only a target with an equal fingerprint can continue results."""
        return bool(self._ended) or any(output.tokens or output.scored for output in self._outputs)

    @property
    def ended(self) -> bool:
        return self.withdrawn or len(self._ended) == len(self._outputs)

    def submit(self, number: int, incarnation: str) -> Submit:
        if not self.begun:
            return Submit(number, incarnation, self.request)
        left = (output for output in self._outputs if output.index not in self._ended)
        return Submit(number, incarnation, self.request, [replace(one, tokens=list(one.tokens)) for one in left])

    def add(self, delta: Delta, step: StepReport) -> None:
        before = self._outputs[delta.index]
        before.tokens.extend(delta.tokens)
        self._outputs[delta.index] = replace(before, scored=before.scored + len(delta.prompt_logprobs))
        if delta.finish is not None:
            self._ended.add(delta.index)
        self.stream.add(self.place, delta, step)
