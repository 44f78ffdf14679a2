"""Ray Serve calls the methods without a caller here."""

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any

from pilotfish.cluster.config import ClusterConfig, Role
from pilotfish.cluster.listing import POOL_DRAIN, Listing
from pilotfish.cluster.worker import LOOK, Worker
from pilotfish.engine.targets.servers import Attendance, Silence
from pilotfish.wire.channel import ChannelThread, Received, decoded, encode
from pilotfish.wire.curve_keys import TargetKeys, load_key_pair
from pilotfish.wire.serving import ATTEND, SERVER_DECODER, Beat, Status
from pilotfish.wire.sockets import DialingChannel

#: A target's peer name on the channel of who attends it.
TARGET = b"0"
#: Seconds between two looks at the channel.
TICK = 0.1


class ServedWorker:
    async def __init__(self, config: ClusterConfig, role: Role) -> None:  # type: ignore[misc]  # Serve awaits it
        self._worker = Worker(config, role)
        await self._worker.start()

    async def reconfigure(self, user_config: dict[str, str]) -> None:
        """The setup's digest is for `cluster up` alone."""

    async def check_health(self) -> None:
        self._worker.check()

    async def record_replica_metadata(self) -> dict[str, Any]:
        return self._worker.about

    async def record_routing_stats(self) -> dict[str, Any]:
        return self._worker.load

    async def __del__(self) -> None:
        """Targets have been told that it drains."""
        await asyncio.sleep(POOL_DRAIN)
        await asyncio.to_thread(self._worker.close)


class Attendant:
    """Knows how a target does until `close`. `silent` is called, on a thread, with the seconds that a target which has
    served was not heard, once they exceed `limit`."""

    def __init__(
        self, endpoint: str, keys: TargetKeys | None, insecure: bool, limit: float, silent: Callable[[float], None]
    ) -> None:
        self.status: Status | None = None  # the last one
        self._limit, self._silent = limit, silent
        self._silence = Silence()
        self._attended = -ATTEND
        channel = DialingChannel([endpoint], secrets.token_bytes(16), [keys], insecure, role="target")
        self._thread = ChannelThread(channel, TICK)
        self._thread.start(self._receive, self._look)

    @property
    def demand(self) -> float:
        """Work over capacity: of requests, waiting ones too, or of KV, whichever is more. Above 1 requests wait."""
        if (status := self.status) is None:
            return 0.0
        slots = status.identity.kv_slots
        requests = status.running + status.waiting
        return max(requests / status.identity.max_requests, (slots - status.free_slots) / slots)

    def close(self) -> None:
        self._thread.close()

    def _receive(self, received: Received) -> None:
        message = decoded(SERVER_DECODER, received.frame)
        if isinstance(message, Beat):
            self._silence.heard()
        elif isinstance(message, Status):
            self.status = message

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._attended >= ATTEND:
            self._attended = now
            self._thread.post(TARGET, encode(Attendance().attend()))
        seconds = self._silence.look(now)
        if seconds > self._limit and self.status is not None:
            self.status = None
            self._silent(seconds)


class ServedTarget(ServedWorker):
    async def __init__(self, config: ClusterConfig, role: Role) -> None:  # type: ignore[misc]
        self._config = config
        self._worker = Worker(config, role)
        self._members = Listing(config, config.pools, self._worker.members)
        key = None if config.key is None else load_key_pair("key", config.key)
        keys = None if key is None else TargetKeys(key, key.public)
        limit = config.server.target_timeout
        self._attendant = Attendant(self._worker.endpoint, keys, config.insecure, limit, self._silent)
        await self._worker.start()

    async def record_routing_stats(self) -> dict[str, Any]:
        if (status := self._attendant.status) is None:
            return self._worker.load
        used = (status.identity.kv_slots - status.free_slots) / status.identity.kv_slots
        return {**self._worker.load, "running": status.running, "waiting": status.waiting, "kv": round(used, 2)}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {"demand": self._attendant.demand}

    async def __del__(self) -> None:
        """Requests that are left have `drain_timeout` seconds; then they go on at another target."""
        deadline = time.monotonic() + self._config.drain_timeout
        while self._worker.ready and self._attendant.demand and time.monotonic() < deadline:
            await asyncio.sleep(LOOK)
        self._attendant.close()
        await asyncio.to_thread(self._worker.close)

    def _silent(self, seconds: float) -> None:
        self._worker.kill(f"was silent for {seconds:.0f} s and is killed")
