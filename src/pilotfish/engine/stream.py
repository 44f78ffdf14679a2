"""What comes back of one request, as an asynchronous iterator that never holds anybody up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from pilotfish.wire.serving import Delta, StepReport


@dataclass(frozen=True)
class Update:
    """What was added to one output of a request."""

    delta: Delta
    steps: tuple[StepReport, ...]  # in which that was

    def then(self, later: Update) -> Update:
        """Both as one: `later` is of the same output."""
        return Update(joined(self.delta, later.delta), (*self.steps, *later.steps))


def joined(first: Delta, later: Delta) -> Delta:
    """Two deltas of one output as one."""
    return Delta(
        id=first.id,
        index=first.index,
        tokens=first.tokens + later.tokens,
        text=first.text + later.text,
        ends=first.ends + later.ends,
        verified=first.verified + later.verified,
        logprobs=first.logprobs + later.logprobs,
        prompt_logprobs=first.prompt_logprobs + later.prompt_logprobs,
        seed=first.seed if later.seed is None else later.seed,
        queued=first.queued if later.queued is None else later.queued,
        finish=later.finish,
    )


class Stream:
    """Updates of one request, until all its outputs have ended. While nobody takes them, those of an output become one,
    so that a slow reader holds no more than the outputs themselves.

    The iterator raises InputError where the target refused the request, TargetUnavailable where it is gone, EngineError
    where a step broke; what came before that is given first.
    """

    def __init__(self, outputs: int, abort: Callable[[], None]) -> None:
        self.open = outputs  # outputs that have not ended
        self._abort = abort
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

    def abort(self) -> None:
        """Nobody waits any more: what the request holds is free before the next step. Idempotent, never waits."""
        self._abort()

    # -- the engine's side

    def add(self, update: Update) -> None:
        """One more update, in the loop's thread."""
        index = update.delta.index
        before = self._updates.get(index)
        self._updates[index] = update if before is None else before.then(update)
        self.open -= update.delta.finish is not None
        self._changed.set()

    def fail(self, error: Exception) -> None:
        """There will be no more."""
        self.open = 0
        self._error = error
        self._changed.set()
