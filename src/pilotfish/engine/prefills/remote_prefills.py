"""Prefill workers, as an engine has them: those that it starts, or pools that it is told of. Imports no torch, which a
target imports while its workers load."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import least_sent, model_name
from pilotfish.config.text import config_text
from pilotfish.core.peers.fields import Peer
from pilotfish.core.prefilling.handover_machine import HandOverMachine
from pilotfish.core.prefilling.prefill_messages import PREFILL_VERSION, PrefillHello
from pilotfish.core.prefilling.prefill_pools import PrefillPool
from pilotfish.core.prefilling.segments import KVIdentity, KVLayout
from pilotfish.engine.drafts.pool_members import PoolMembers
from pilotfish.engine.drafts.remote_drafts import ANSWER, LOADING, MAX_RESTARTS, SWITCH_INTERVAL, pool_members, salt_key
from pilotfish.engine.prefills.handovers import HandOvers, LayerWriter
from pilotfish.engine.processes.launch import Supervisor, WorkerState, wait_until
from pilotfish.engine.processes.placement import split_for_prefill
from pilotfish.engine.processes.process import WorkerSpec, keep_freed_memory
from pilotfish.engine.targets.members import Member
from pilotfish.errors import EngineError, ModelError
from pilotfish.wire.channel import ChannelThread
from pilotfish.wire.curve_keys import load_key_pair, load_target_keys
from pilotfish.wire.sockets import DialingChannel

logger = logging.getLogger(__name__)

#: Seconds between two looks at greetings and leases.
TICK = 0.05


class RemotePrefills:
    """The pools that `config` names, those that it is told of while it runs or, where it names none, prefill workers,
    which start when this is made and run until `close`."""

    handovers: HandOvers  # once `connect` has made them

    def __init__(self, config: EngineConfig, taken: frozenset[int] = frozenset()) -> None:
        """`taken` are cores of draft workers. ParameterError for cores that cannot be used."""
        self.cores = frozenset[int]()  # of the target; empty: its own business
        self._config = config
        self._open = ExitStack()
        self._supervisor: Supervisor | None = None
        self.endpoints, self._names = config.prefill_pool, ("",) * len(config.prefill_pool)
        if config.prefill_workers:
            self._names = tuple(f"prefill {i}" for i in range(config.prefill_workers))
            self._start_workers(self._names, taken)

    def _start_workers(self, names: Sequence[str], taken: frozenset[int]) -> None:
        config, free = self._config, frozenset(os.sched_getaffinity(0)) - taken
        placement = split_for_prefill(free, config.cores, config.prefill_cores, len(names), taken)
        self.cores = placement.target
        self._supervisor = supervisor = Supervisor()
        self._open.callback(supervisor.close)
        self.endpoints = tuple(f"ipc://{supervisor.directory}/prefill-{i}" for i in range(len(names)))
        workers = zip(names, self.endpoints, placement.workers, strict=True)
        supervisor.start(
            [WorkerSpec(name, prefill_command(config, endpoint, name), cores) for name, endpoint, cores in workers]
        )

    def connect(self, identity: Callable[[], KVIdentity], layout: KVLayout, writer: LayerWriter) -> HandOvers:
        """Of a target whose KV has this identity, which is asked for once a pool is there, and layout, and is written
        by `writer`; once every pool serves, or it is clear that one does not. ModelError for a pool that must not serve
        this target, EngineError for a worker that does not start."""
        config = self._config
        keys = load_target_keys(config.prefill_key, config.prefill_pool_key, len(self.endpoints), "prefill")
        own = None if config.prefill_key is None else load_key_pair("prefill_key", config.prefill_key)
        channel = DialingChannel((), secrets.token_bytes(8), insecure=config.insecure, role="prefill")
        thread = ChannelThread(channel, TICK)
        machine = HandOverMachine(None, (), least_sent(config.prefill_threshold), salt_key(own))
        handovers = self.handovers = HandOvers(
            machine, writer, layout, thread.post, channel.problem, config.prefill_transports
        )
        self._identity, self._channel = identity, channel
        self._members = PoolMembers(channel, thread, own, _prefill_pool, handovers)
        self._open.callback(handovers.close)
        self._open.callback(sys.setswitchinterval, sys.getswitchinterval())
        self._open.callback(thread.close)
        sys.setswitchinterval(SWITCH_INTERVAL)
        keep_freed_memory()
        thread.start(handovers.receive, handovers.tick)
        if self.endpoints:
            self._introduce()
            self._members.begin(pool_members("prefill", self.endpoints, keys, self._names))
        self.wait(optional=False)
        return handovers

    @property
    def pools(self) -> Sequence[PrefillPool]:
        """Those that there are at present, once `connect` has dialled the first ones."""
        return self.handovers.machine.pools

    def set_pools(self, members: Sequence[Member]) -> None:
        """From now on there are these pools; by one thread at a time, after `connect`. What one that leaves was to
        compute is computed by the target, and no token changes."""
        if members:
            self._introduce()
        self._members.set(members)

    def _introduce(self) -> None:
        """The identity takes seconds to find where weights are large."""
        if self.handovers.machine.greeting is None:
            greeting = PrefillHello(PREFILL_VERSION, self._identity(), model_name(self._config.target))
            self.handovers.machine.greeting = greeting

    def wait(self, *, optional: bool) -> None:
        """Until every pool serves or, where that is `optional`, it is clear that one does not."""
        deadline = time.monotonic() + (LOADING if self._supervisor is not None else ANSWER)
        for pool in self.pools:
            self._wait_for(pool, deadline - time.monotonic(), optional)

    def close(self) -> None:
        """Leave the pools; end the workers. Idempotent."""
        self._open.close()

    def workers(self) -> Sequence[WorkerState]:
        """Of this engine."""
        return () if self._supervisor is None else self._supervisor.poll()

    def _wait_for(self, pool: PrefillPool, timeout: float, optional: bool) -> None:
        """Until it serves. Whether it must not, or nobody is there, is another matter: who is not there may come."""
        try:
            wait_until(lambda: pool.ready, lambda: self._in_vain(pool), timeout, pool.name)
        except EngineError:
            reason = self._in_vain(pool)
            if reason is not None and not optional:
                raise (EngineError if self._crashing() else ModelError)(reason) from None
            reason = reason or self._channel.problem(pool.peer) or f"prefill_pool: {pool.name} does not answer"
            logger.warning("%s; prompts are computed without it until it comes", reason)

    def _in_vain(self, pool: PrefillPool) -> str | None:
        """Why it cannot be used."""
        if pool.refusal is not None:
            return f"prefill_pool: {pool.name}: {pool.refusal}"
        if self._channel.refused(pool.peer):
            return self._channel.problem(pool.peer)
        down = (state for state in self.workers() if state.status == "failed" or state.restarts >= MAX_RESTARTS)
        return next((state.problem for state in down if state.problem), None)

    def _crashing(self) -> bool:
        """Whether it is the workers, not what they were given, that are to blame."""
        return self._supervisor is not None and all(state.status != "failed" for state in self.workers())


def _prefill_pool(member: Member, peer: Peer) -> PrefillPool:
    return PrefillPool(member.label, peer, scheme=member.endpoint.partition(":")[0])


def prefill_command(config: EngineConfig, endpoint: str, name: str) -> list[str]:
    """The command line of a worker, which starts from the configuration of its engine, less the target's cores: a
    worker may not use them."""
    own = {"config": config_text(replace(config, cores="")), "listen": endpoint, "name": name}
    return [sys.executable, "-m", "pilotfish", "prefill", *(f"--{option}={value}" for option, value in own.items())]
