"""A small share of the speculated requests is generated again without speculation while the targets are idle; in
float32 the tokens must be equal. A replay stops, and waits again, when a client's request comes."""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.targets.async_engine import AsyncEngine
from pilotfish.errors import EngineError, InputError, TargetUnavailable
from pilotfish.server.observe.metrics import ServerMetrics
from pilotfish.wire.serving import EngineRequest

logger = logging.getLogger(__name__)

WAITING = 8  # requests that wait for replay: newer ones replace older ones
LONGEST = 8192  # most tokens of prompt and output of a replayed request
LOOK = 0.25  # seconds between two checks whether the targets are idle

Verdict = Literal["equal", "unequal", "given_up"]


@dataclass(frozen=True)
class ReplayedRequest:
    id: str
    variant: str
    prompt: Sequence[int]
    params: SamplingParams  # with the seed that it had
    output: Sequence[int]


class Canary:
    def __init__(self, engine: AsyncEngine, metrics: ServerMetrics, idle: Callable[[], bool]) -> None:
        self._engine, self._metrics, self._idle = engine, metrics, idle
        self._waiting = deque[ReplayedRequest](maxlen=WAITING)
        self.replaying = False

    def offer(self, replay: ReplayedRequest) -> None:
        if len(replay.prompt) + len(replay.output) <= LONGEST:
            self._waiting.append(replay)

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK)
            if self._waiting and self._idle():
                self.replaying = True
                try:
                    await self._turn(self._waiting.pop())
                finally:
                    self.replaying = False

    async def _turn(self, replay: ReplayedRequest) -> None:
        verdict, tokens = await self._replayed(replay)
        self._metrics["pilotfish_canary_replays", verdict].inc()
        if verdict == "given_up":
            self._waiting.appendleft(replay)
        elif verdict == "unequal":
            self._tell(replay, tokens)

    async def _replayed(self, replay: ReplayedRequest) -> tuple[Verdict, list[int]]:
        tokens = list[int]()
        try:
            salt = f"canary {secrets.token_hex(8)}"  # so that no KV of the first time is found
            stream = self._engine.submit([EngineRequest(list(replay.prompt), replay.params, salt, max_nodes=0)])
            async for update in stream:
                tokens += update.delta.tokens
                if not self._idle():
                    stream.abort()
                    return "given_up", tokens
        except (EngineError, InputError, TargetUnavailable) as error:
            logger.info("canary: %s was not replayed: %s", replay.id, error)
            return "given_up", tokens
        return ("equal" if tokens == list(replay.output) else "unequal"), tokens

    def _tell(self, replay: ReplayedRequest, tokens: Sequence[int]) -> None:
        """In float32 a difference is a bug; in lower precision a batch of other rows may round otherwise."""
        identity = self._engine.health.identity
        dtype = "" if identity is None else identity.dtype
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(replay.output, tokens, strict=False)))
        message = "canary: request %s of variant %s has other tokens without speculation, from token %d of %d on (%s)"
        level = logging.ERROR if dtype == "float32" else logging.INFO
        logger.log(level, message, replay.id, replay.variant, same, len(replay.output), dtype)
