"""Several streams as one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pilotfish.server.engine import Stream, Update


class Merged:
    """The updates of all streams, each with its stream's number, as they come. Of each stream at most one is taken
    ahead: what a slow reader leaves is for the streams to merge. The first error ends it."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._queue: asyncio.Queue[tuple[int, Update | Exception | None]] = asyncio.Queue(1)
        self._tasks = [asyncio.create_task(self._feed(i, stream)) for i, stream in enumerate(streams)]
        self._left = len(self._tasks)

    async def _feed(self, i: int, stream: Stream) -> None:
        """None: the stream has ended."""
        try:
            async for update in stream:
                await self._queue.put((i, update))
            await self._queue.put((i, None))
        except Exception as error:
            await self._queue.put((i, error))

    def __aiter__(self) -> Merged:
        return self

    async def __anext__(self) -> tuple[int, Update]:
        while self._left:
            i, item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            if item is not None:
                return i, item
            self._left -= 1
        raise StopAsyncIteration

    def close(self) -> None:
        """Take no more. Idempotent."""
        for task in self._tasks:
            task.cancel()
