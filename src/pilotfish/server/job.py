"""A request under way: its prompts' streams as one, within its deadline, ended as soon as nobody waits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive

from pilotfish.config import MetricsLevel
from pilotfish.core.request import FinishReason
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.server.engine import Engine, Stream, Update
from pilotfish.server.failures import ClientGone, late
from pilotfish.server.gate import Ticket
from pilotfish.server.merged import Merged
from pilotfish.server.prompts import Prompt
from pilotfish.wire.serving import Delta, Finish

Result = TypeVar("Result")


@dataclass(frozen=True)
class Plan:
    """A request, understood: what goes to the engine and what is to be answered."""

    id: str
    created: int
    model: str
    fingerprint: str
    prompts: tuple[Prompt, ...]
    params: SamplingParams
    max_nodes: int | None
    cache_salt: str | None
    seconds: float  # that it may take
    metrics: MetricsLevel
    spec_tokens: int  # most nodes of a tree that the target verifies
    logprobs: int | None
    prompt_logprobs: bool  # asked for by that name
    echo: bool = False
    echoed: str = ""  # what a chat's answer begins with
    only_echo: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False  # in log-probabilities
    seed_as_text: bool = False
    detail: bool = False
    usage: bool = False  # with the stream's last event
    continuous_usage: bool = False

    @property
    def outputs(self) -> int:
        return len(self.prompts) * self.params.n

    @property
    def every_update(self) -> bool:
        """Whether the stream tells of updates that add no text."""
        return self.detail or self.continuous_usage or self.token_ids


@dataclass(frozen=True)
class Growth:
    """An update of the output that the client knows by `index`."""

    index: int
    delta: Delta
    update: Update


class Job:
    """The streams of a plan. Whoever makes one closes it."""

    def __init__(self, plan: Plan, engine: Engine, ticket: Ticket) -> None:
        self.plan = plan
        self.used_tokens = sum(len(prompt.tokens) for prompt in plan.prompts)
        self._ends = time.monotonic() + plan.seconds
        self._engine = engine
        self._ticket: Ticket | None = ticket
        self._streams: list[Stream] = []
        self._merged: Merged | None = None

    def submit(self) -> None:
        """TargetUnavailable where the target is not ready."""
        plan = self.plan
        for prompt in plan.prompts:
            self._streams.append(self._engine.submit(prompt.tokens, plan.params, plan.cache_salt, plan.max_nodes))
        if len(self._streams) > 1:
            self._merged = Merged(self._streams)

    def __aiter__(self) -> Job:
        return self

    async def __anext__(self) -> Growth:
        """HttpError 504 after the deadline; what a Stream raises."""
        assert self._ticket is not None  # or it is closed
        try:
            async with asyncio.timeout(self._ends - time.monotonic()):
                prompt, update = await self._next()
        except TimeoutError as error:
            raise late(self.plan.seconds) from error
        index = prompt * self.plan.params.n + update.delta.index
        self._ticket.update(index, update)
        self.used_tokens += len(update.delta.tokens)
        return Growth(index, _nothing(update.delta) if self.plan.only_echo else update.delta, update)

    async def _next(self) -> tuple[int, Update]:
        return await anext(self._merged) if self._merged is not None else (0, await anext(self._streams[0]))

    def close(self, error: BaseException | None = None) -> None:
        """Abort what still runs, give the ticket back. Idempotent."""
        for stream in self._streams:
            stream.abort()
        if self._merged is not None:
            self._merged.close()
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            known = error is None or isinstance(error, Exception)
            ticket.close(self.used_tokens, error if known else ClientGone())  # type: ignore[arg-type]


def _nothing(delta: Delta) -> Delta:
    """The delta of an output of which only the prompt is wanted: one token is generated, and dropped."""
    finish = delta.finish and Finish(FinishReason.LENGTH, None)
    return msgspec.structs.replace(delta, tokens=[], text="", ends=[], verified=[], logprobs=[], finish=finish)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` returns. Once the client is gone it is cancelled, and ClientGone raised."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
