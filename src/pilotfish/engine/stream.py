"""The outputs of a request as an asynchronous iterator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from pilotfish.wire.serving import Delta, StepReport


@dataclass(frozen=True)
class Update:
    """Tokens and text added to one output since the last read (several steps if the reader is slow)."""

    delta: Delta
    steps: tuple[StepReport, ...]

    def then(self, later: Update) -> Update:
        """Join with a later update of the same output."""
        return Update(joined(self.delta, later.delta), (*self.steps, *later.steps))


def joined(first: Delta, later: Delta) -> Delta:
    """Two deltas of one output as one. `seed` and `queued` come with its first one."""
    return replace(
        first,
        tokens=first.tokens + later.tokens,
        text=first.text + later.text,
        ends=first.ends + later.ends,
        verified=first.verified + later.verified,
        logprobs=first.logprobs + later.logprobs,
        prompt_logprobs=first.prompt_logprobs + later.prompt_logprobs,
        finish=later.finish,
    )


class Stream:
    """Updates of a request until all its outputs have ended. Unread updates of an output are joined into one, so that a
    slow reader costs no more memory than the outputs.

    After the updates so far the iterator raises InputError if the target refused the request, TargetUnavailable if the
    target is gone, EngineError if a step broke.
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
        """End the request; the target frees its slots before the next step. Idempotent, never waits."""
        self._abort()

    # -- the engine's side

    def add(self, update: Update) -> None:
        """To be called in the event loop's thread."""
        index = update.delta.index
        before = self._updates.get(index)
        self._updates[index] = update if before is None else before.then(update)
        self.open -= update.delta.finish is not None
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self.open = 0
        self._error = error
        self._changed.set()
