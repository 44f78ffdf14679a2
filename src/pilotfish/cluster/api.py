"""The application of `pilotfish serve` over the cluster's targets; Ray Serve's proxies listen."""

import asyncio
import contextlib
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from starlette.applications import Starlette

from pilotfish.cluster.config import ClusterConfig, Role
from pilotfish.cluster.listing import Listing, introduction
from pilotfish.cluster.preflight import clients
from pilotfish.cluster.worker import own_id
from pilotfish.errors import EngineError
from pilotfish.prompts import read_chat_template
from pilotfish.server.application import PERIOD, Application, ServerSetup

#: Seconds between two looks while it starts.
LOOK = 0.1
#: Seconds in which a server reaches one of the targets that serve, or is replaced by one elsewhere.
OUT_OF_REACH = 30.0


class ServedApi:
    """Ray Serve calls the methods without a caller here."""

    async def __init__(self, config: ClusterConfig, role: Role) -> None:  # type: ignore[misc]  # Serve awaits it
        self._config = config
        self._about = introduction(config, role, own_id(config, role))
        self._directory = Path(tempfile.mkdtemp(prefix="pilotfish-"))
        members = self._directory / "members.json"
        self._members = Listing(config, ("target",), members)
        server = replace(config.server, target_key=config.key)
        if server.chat_template is not None:
            server = replace(server, chat_template=read_chat_template(server.chat_template))
        setup = ServerSetup(config.server_engine(members), server, clients(config), "text")
        self._application = Application(setup)
        await self._application.start()
        self._watching = asyncio.create_task(self._watch())
        await self._wait_for_targets()
        self._last_ready = monotonic()

    async def _wait_for_targets(self) -> None:
        deadline = monotonic() + self._config.start_timeout
        while not (health := self._application.engine.health).ready:
            if monotonic() > deadline:
                raise EngineError(f"api: no target within {self._config.start_timeout:g} s ({health.reason})")
            await asyncio.sleep(LOOK)

    async def _watch(self) -> None:
        while True:
            self._application.look()
            await asyncio.sleep(PERIOD)

    async def __serve_build_asgi_app__(self) -> Starlette:
        return self._application.asgi

    async def reconfigure(self, user_config: dict[str, str]) -> None:
        """The setup's digest is for `cluster up` alone."""

    async def record_replica_metadata(self) -> dict[str, Any]:
        return self._about

    async def record_routing_stats(self) -> dict[str, Any]:
        targets = sum(replica.ready for replica in self._application.engine.health.replicas)
        return {"pid": os.getpid(), "requests": self._application.admission.requests, "targets": targets}

    async def check_health(self) -> None:
        """Replaces a server that alone cannot reach targets, not one without any targets."""
        health = self._application.engine.health
        if health.ready or not self._members.serving:
            self._last_ready = monotonic()
        elif monotonic() - self._last_ready > OUT_OF_REACH:
            raise EngineError(f"api: {health.reason}")

    async def __del__(self) -> None:
        """Ray Serve has waited for its requests."""
        self._watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._watching
        await self._application.close()
        shutil.rmtree(self._directory, ignore_errors=True)
