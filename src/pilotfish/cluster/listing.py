import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from pilotfish.cluster.config import DEPLOYMENTS, ClusterConfig, Role
from pilotfish.cluster.heard import LISTENERS, Listed
from pilotfish.engine.targets.members import Member, Members, write_members


def introduction(config: ClusterConfig, role: Role, id: str, endpoint: str = "", key: str = "") -> dict[str, Any]:
    return {
        "role": role,
        "endpoint": endpoint,
        "key": key,
        "name": f"{role}-{id}",
        "revision": config.of(role).revision,
        "version": version("pilotfish"),
        "model": str(config.model_of(role)),
    }


#: Seconds that pools drain: sessions move with their next commit, prompts take longer.
POOL_DRAIN = 5.0
#: Which members a role's processes are.
_FIELDS: Mapping[Role, str] = {"target": "targets", "draft": "draft_pools", "prefill": "prefill_pools"}


class Listing:
    def __init__(self, config: ClusterConfig, roles: Sequence[Role], path: Path | None = None) -> None:
        """Members are written to `path`, if there is one, after each change."""
        from pilotfish.cluster.alpha import follow

        self._config, self._roles, self._path = config, roles, path
        self._written: Members | None = None
        self._writing, self._made = threading.Lock(), False
        self._replicas: dict[Role, Sequence[Listed]] = {}
        self._left: dict[Role, Mapping[Member, float]] = {}  # who has left, and until when it drains
        self._told = threading.Condition()
        for role in roles:
            LISTENERS[config.application(role)] = partial(self._take, role)
        self._handles = [follow(config.application(role), DEPLOYMENTS[role]) for role in roles]
        self._made = True
        self._changed()

    def close(self) -> None:
        for handle in self._handles:
            handle.shutdown()

    def of(self, role: Role) -> Sequence[Listed]:
        return self._replicas.get(role, ())

    def members(self, role: Role) -> tuple[Member, ...]:
        present, now = [one.member for one in self.of(role)], time.monotonic()
        taken = {member.endpoint for member in present}
        left = [member for member, until in self._left.get(role, {}).items() if until > now]
        draining = [msgspec.structs.replace(member, draining=True) for member in left if member.endpoint not in taken]
        return (*present, *draining)

    @property
    def serving(self) -> bool:
        return any(one.load.get("ready") for role in self._roles for one in self.of(role))

    def wait(self, seconds: float) -> None:
        with self._told:
            self._told.wait_for(lambda: len(self._replicas) >= len(self._handles), seconds)

    def _take(self, role: Role, replicas: Sequence[Listed]) -> None:
        with self._told:
            before = _members(self.of(role))
            self._replicas[role] = sorted(replicas, key=lambda one: one.id)
            gone = before - _members(replicas)
            if gone:
                self._left[role] = {**self._left.get(role, {}), **dict.fromkeys(gone, self._until(role))}
            self._told.notify_all()
        self._changed()

    def _changed(self) -> None:
        """On any thread. Ray tells of the first ones while it is still asked for the others, and must not wait."""
        if self._path is None or not self._made:
            return
        with self._writing:
            members = Members(**{_FIELDS[role]: self.members(role) for role in self._roles})
            if members != self._written:
                write_members(self._path, members)
                self._written = members

    def _until(self, role: Role) -> float:
        seconds = self._config.drain_timeout if role == "target" else POOL_DRAIN
        timer = threading.Timer(seconds, self._changed)
        timer.daemon = True
        timer.start()
        return time.monotonic() + seconds


def _members(replicas: Sequence[Listed]) -> set[Member]:
    return {one.member for one in replicas if one.about["endpoint"]}
