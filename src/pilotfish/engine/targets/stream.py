"""The outputs of one or several prompts as an asynchronous iterator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.wire.serving import Delta, StepReport


@dataclass(frozen=True)
class Update:
    """Tokens and text added to one output since the last read (several steps if the reader is slow)."""

    index: int  # of the output, counted through all prompts
    delta: Delta
    steps: tuple[StepReport, ...]


class Updates(Protocol):
    """What an answer is made of: a Stream, or what stands for one."""

    async def __anext__(self) -> Update: ...

    def abort(self) -> None: ...

    def revise(self, max_nodes: int | None, /) -> None: ...


class Submits(Protocol):
    """Takes requests: an AsyncEngine, or what stands for one."""

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        cache_salt: str | None = None,
        max_nodes: int | None = None,
        session: str | None = None,
        draft: str = "",
    ) -> Updates: ...


#: What a delta adds to its output.
ADDED = ("tokens", "text", "ends", "verified", "logprobs", "prompt_logprobs", "handovers")


def joined(first: Delta, later: Delta) -> Delta:
    """Two deltas of one output as one."""
    sums = {name: getattr(first, name) + getattr(later, name) for name in ADDED}
    begin = first if first.tokens else later  # `seed`, `queued`, `cached` and `pool` come with the first tokens
    return replace(begin, **sums, finish=later.finish)


def merged(first: Update, later: Update) -> Update:
    return Update(first.index, joined(first.delta, later.delta), (*first.steps, *later.steps))


class Stream:
    """Updates of `n` outputs of each prompt until all have ended. Unread updates of an output are joined into one, so
    that a slow reader costs no more memory than the outputs.

    After the updates so far the iterator raises InputError if the target refused the request, TargetUnavailable if the
    target is gone, EngineError if a step broke.
    """

    def __init__(self, prompts: int, n: int, abort: Callable[[], None]) -> None:
        """`abort` ends the request; the target frees its slots before the next step. Idempotent, never waits."""
        self.abort = abort
        self.revise: Callable[[int | None], None] = lambda _: None  # has trees of so many nodes verified from now on
        self.open = prompts * n  # outputs that have not ended
        self._n = n
        self._updates: dict[int, Update] = {}  # by output, in the order of their arrival
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def __aiter__(self) -> Stream:
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

    # -- the engine's side

    def add(self, prompt: int, delta: Delta, step: StepReport) -> None:
        """What a step added to an output of the prompt in this place. To be called in the event loop's thread."""
        index = prompt * self._n + delta.index
        update, before = Update(index, delta, (step,)), self._updates.get(index)
        self._updates[index] = update if before is None else merged(before, update)
        self.open -= delta.finish is not None
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self.open = 0
        self._error = error
        self._changed.set()
