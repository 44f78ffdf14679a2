"""The deployments of draft pools, prefill pools and targets, as Ray Serve wants them: it calls what has no caller
here."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pilotfish.cluster.attendant import Attendant
from pilotfish.cluster.config import ClusterConfig, Role
from pilotfish.cluster.listing import POOL_DRAIN, MembersListing
from pilotfish.cluster.worker import LOOK, Worker
from pilotfish.wire.curve_keys import TargetKeys, load_key_pair


class ServedWorker:
    role: Role

    async def __init__(self, config: ClusterConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        self._worker = Worker(config, self.role)
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


class ServedDraftPool(ServedWorker):
    role = "draft"


class ServedPrefillPool(ServedWorker):
    role = "prefill"


class ServedTarget(ServedWorker):
    """Its pools come and go: a file tells its process."""

    role = "target"

    async def __init__(self, config: ClusterConfig) -> None:  # type: ignore[misc]
        self._config = config
        self._worker = Worker(config, self.role)
        self._members = MembersListing(config, config.pools, self._worker.members)
        key = None if config.key is None else load_key_pair("key", config.key)
        keys = None if key is None else TargetKeys(key, key.public)
        limit = config.server.target_timeout
        self._attendant = Attendant(self._worker.endpoint, keys, config.insecure, limit, self._silent)
        await self._worker.start()

    async def record_routing_stats(self) -> dict[str, Any]:
        return {**self._worker.load, **self._state}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {"demand": self._attendant.demand}

    async def __del__(self) -> None:
        """Requests that are left have `drain_timeout` seconds; then they go on at another target."""
        deadline = time.monotonic() + self._config.drain_timeout
        while self._worker.ready and self._attendant.demand and time.monotonic() < deadline:
            await asyncio.sleep(LOOK)
        self._attendant.close()
        await asyncio.to_thread(self._worker.close)

    @property
    def _state(self) -> dict[str, Any]:
        if (status := self._attendant.status) is None:
            return {}
        used = status.identity.kv_slots - status.free_slots
        return {"running": status.running, "waiting": status.waiting, "kv": round(used / status.identity.kv_slots, 2)}

    def _silent(self, seconds: float) -> None:
        self._worker.kill(f"was silent for {seconds:.0f} s and is killed")
