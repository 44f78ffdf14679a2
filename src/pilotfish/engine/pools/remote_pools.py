"""Workers that an engine starts, or pools that it is told of. Imports no torch: it does so while its workers load."""

import hashlib
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import ClassVar, Generic

from pilotfish.config.engine import EngineConfig
from pilotfish.config.text import config_text
from pilotfish.core.drafting.pools import DraftPool
from pilotfish.core.peers.fields import Peer
from pilotfish.core.prefilling.prefill_pools import PrefillPool
from pilotfish.engine.pools.pool_members import PoolMembers
from pilotfish.engine.processes.launch import Supervisor, WorkerState, wait_until
from pilotfish.engine.processes.placement import Placement
from pilotfish.engine.processes.process import WorkerSpec, command_of
from pilotfish.engine.targets.members import Member, Members, MembersFile, MembersThread
from pilotfish.errors import EngineError, ModelError
from pilotfish.wire.channel import ChannelThread
from pilotfish.wire.curve_keys import KeyPair, load_key_pair, load_target_keys
from pilotfish.wire.endpoints import check_spelling
from pilotfish.wire.pool_users import AnyPool, PoolUser
from pilotfish.wire.sockets import DialingChannel

logger = getLogger(__name__)

#: Seconds that a worker may take to load, and a pool to answer.
LOADING, ANSWER = 600.0, 5.0
MAX_RESTARTS = 3  # starts again after which a worker that never served is given up
#: Seconds after which a thread that holds the interpreter gives way: between two forwards the step loop must not wait
#: for the thread that owns the channel as long as Python's own 5 ms.
SWITCH_INTERVAL = 0.0002


class RemotePools(ABC, Generic[AnyPool]):
    """The configured pools, those told at run time or, if none is named, workers, which run until `close`."""

    role: ClassVar[str]  # draft, prefill
    without: ClassVar[str]  # how a target goes on without a pool
    must_answer: ClassVar[bool]  # whether a pool that nobody answers for is an error, unless it is optional

    def __init__(self, config: EngineConfig, endpoints: tuple[str, ...]) -> None:
        self.cores = config.core_set  # of the target; empty: wherever the system likes
        self.endpoints = endpoints
        self._config = config
        self._names = ("",) * len(endpoints)
        self._open = ExitStack()
        self._supervisor: Supervisor | None = None

    def _start_workers(self, placement: Placement) -> None:
        self.cores, role = placement.target, self.role
        self._supervisor = supervisor = Supervisor()
        self._open.callback(supervisor.close)
        self._names = tuple(f"{role} {i}" for i in range(len(placement.workers)))
        self.endpoints = tuple(f"ipc://{supervisor.directory}/{role}-{i}" for i in range(len(placement.workers)))
        workers = zip(self._names, self.endpoints, placement.workers, strict=True)
        supervisor.start(
            [WorkerSpec(name, worker_command(role, self._config, where, name), cores) for name, where, cores in workers]
        )

    def _make_channel(self, key: Path | None, pool_keys: Sequence[str], period: float) -> None:
        self._keys = load_target_keys(key, pool_keys, len(self.endpoints), self.role)
        self._own = None if key is None else load_key_pair(f"{self.role}_key", key)
        self._channel = DialingChannel((), secrets.token_bytes(8), insecure=self._config.insecure, role=self.role)
        self._thread = ChannelThread(self._channel, period)

    def _start_channel(self, user: PoolUser[AnyPool], make: Callable[[Member, Peer], AnyPool]) -> None:
        self._user = user
        self._members = PoolMembers(self._channel, self._thread, self._own, make, user)
        self._open.callback(sys.setswitchinterval, sys.getswitchinterval())
        self._open.callback(self._thread.close)
        sys.setswitchinterval(SWITCH_INTERVAL)
        self._thread.start(user.receive, user.tick)

    def _dial(self) -> None:
        """ParameterError for an invalid endpoint."""
        for endpoint in self.endpoints:
            check_spelling(f"{self.role}_pool", endpoint)
        pools = zip(self.endpoints, self._keys, self._names, strict=True)
        self._members.begin([Member(where, "" if own is None else own.pool, name) for where, own, name in pools])

    @property
    def pools(self) -> Sequence[AnyPool]:
        """Once the first ones were dialled."""
        return self._user.machine.pools

    def set_pools(self, members: Sequence[Member]) -> None:
        """By one thread at a time, after they were connected. Others take over from one that leaves."""
        self._members.set(members)

    def wait(self, *, optional: bool) -> None:
        """Until every pool serves or, if `optional`, it is clear that one does not."""
        deadline = time.monotonic() + self._patience
        for pool in self.pools:
            self._wait_for(pool, deadline - time.monotonic(), optional)

    @property
    def _patience(self) -> float:
        return ANSWER if self._supervisor is None else LOADING

    def _wait_for(self, pool: AnyPool, timeout: float, optional: bool) -> None:
        """ModelError for an unusable pool, EngineError for a worker that does not start."""
        try:
            wait_until(lambda: self._is_settled(pool), lambda: self._in_vain(pool), timeout, pool.name)
        except EngineError:
            reason, late = self._in_vain(pool), f"{self.role}_pool: {pool.name}: not ready within {self._patience:g} s"
            if not optional and (self.must_answer or reason is not None):
                reason = reason or self._channel.problem(pool.peer) or late
                crashing = self._supervisor is not None and all(state.status != "failed" for state in self.workers())
                raise (EngineError if crashing else ModelError)(reason) from None
            logger.warning("%s; %s", reason or self._channel.problem(pool.peer) or late, self.without)

    def _is_settled(self, pool: AnyPool) -> bool:
        return pool.ready

    @abstractmethod
    def _in_vain(self, pool: AnyPool) -> str | None:
        """Why waiting for it is in vain."""

    def _worker_down(self) -> str | None:
        down = (state for state in self.workers() if state.status == "failed" or state.restarts >= MAX_RESTARTS)
        return next((state.problem for state in down if state.problem), None)

    def workers(self) -> Sequence[WorkerState]:
        return () if self._supervisor is None else self._supervisor.poll()

    def close(self) -> None:
        self._open.close()


class FollowedMembers:
    def __init__(
        self, file: MembersFile, drafts: RemotePools[DraftPool] | None, prefills: RemotePools[PrefillPool] | None
    ) -> None:
        """Returns when the pools that the file names now serve, or time is up. None: the target uses no such pools."""
        self._drafts, self._prefills = drafts, prefills
        self._take_in(file.members)
        for role, pools in (("draft", drafts), ("prefill", prefills)):
            if pools is not None:
                pools.wait(optional=True)
            elif getattr(file.members, f"{role}_pools"):
                logger.info("members: %s pools are of no use to this target", role)
        self._thread = MembersThread(file, self._take_in)

    def _take_in(self, members: Members) -> None:
        if self._drafts is not None:
            self._drafts.set_pools(members.draft_pools)
        if self._prefills is not None:
            self._prefills.set_pools(members.prefill_pools)

    def close(self) -> None:
        self._thread.close()


def worker_command(role: str, config: EngineConfig, endpoint: str, name: str) -> list[str]:
    return command_of(role, config=config_text(replace(config, cores="")), listen=endpoint, name=name)


def salt_key(own: KeyPair | None) -> bytes:
    """Keeps pools from trying which salt has a digest. Targets with one key share it; else each process has its own."""
    if own is None:
        return secrets.token_bytes(32)
    return hashlib.blake2b(own.secret.encode(), person=b"pilotfish salts", digest_size=32).digest()
