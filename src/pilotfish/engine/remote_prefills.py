"""Prefill workers, as an engine has them: those that it starts, or pools that it is told of. Imports no torch, which a
target imports while its workers load."""

from __future__ import annotations

import logging
import os
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from pilotfish.config import EngineConfig, config_text, least_sent, model_name
from pilotfish.core.handover_machine import HandOverMachine
from pilotfish.core.prefill_messages import PREFILL_VERSION, Greeting
from pilotfish.core.prefill_pools import PrefillPool
from pilotfish.core.segments import KVIdentity
from pilotfish.engine.handovers import HandOvers, LayerWriter
from pilotfish.engine.launch import Supervisor, WorkerState, wait_until
from pilotfish.engine.placement import split_for_prefill
from pilotfish.engine.process import WorkerSpec, keep_freed_memory
from pilotfish.engine.remote_drafts import ANSWER, LOADING, MAX_RESTARTS, SWITCH_INTERVAL, salt_key
from pilotfish.errors import EngineError, ModelError
from pilotfish.wire.channel import ChannelThread
from pilotfish.wire.curve_keys import load_target_keys
from pilotfish.wire.sockets import DialingChannel

logger = logging.getLogger(__name__)

#: Seconds between two looks at greetings and leases.
TICK = 0.05


class RemotePrefills:
    """The pools that `config` names or, where it names none, prefill workers, which start when this is made and run
    until `close`."""

    handovers: HandOvers  # once `connect` has made them

    def __init__(self, config: EngineConfig, taken: frozenset[int] = frozenset()) -> None:
        """`taken` are cores of draft workers. ParameterError for cores that cannot be used."""
        self.cores = frozenset[int]()  # of the target; empty: its own business
        self._config = config
        self._open = ExitStack()
        self._supervisor: Supervisor | None = None
        self.endpoints = names = config.prefill_pool
        if not config.prefill_pool:
            names = tuple(f"prefill {i}" for i in range(config.prefill_workers))
            self._start_workers(names, taken)
        self.pools = [PrefillPool(name, str(i).encode()) for i, name in enumerate(names)]

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

    def connect(self, identity: KVIdentity, writer: LayerWriter) -> HandOvers:
        """Of a target whose KV has this identity, and is written by `writer`; once every pool serves, or it is clear
        that one does not. ModelError for a pool that must not serve this target, EngineError for a worker that does
        not start."""
        config, endpoints = self._config, self.endpoints
        keys = load_target_keys(config.prefill_key, config.prefill_pool_key, len(endpoints), "prefill")
        channel = DialingChannel(endpoints, secrets.token_bytes(8), keys, insecure=config.insecure, role="prefill")
        thread = ChannelThread(channel, TICK)
        greeting = Greeting(PREFILL_VERSION, identity, model_name(config.target))
        machine = HandOverMachine(greeting, self.pools, least_sent(config.prefill_threshold), salt_key(keys))
        schemes = [endpoint.split(":")[0] for endpoint in endpoints]
        handovers = self.handovers = HandOvers(
            machine, writer, identity.layout, thread.post, channel.problem, config.prefill_transports, schemes
        )
        self._open.callback(handovers.close)
        self._open.callback(sys.setswitchinterval, sys.getswitchinterval())
        self._open.callback(thread.close)
        sys.setswitchinterval(SWITCH_INTERVAL)
        keep_freed_memory()
        thread.start(handovers.receive, handovers.tick)
        deadline = time.monotonic() + (ANSWER if self._supervisor is None else LOADING)
        for pool in self.pools:
            self._wait_for(pool, channel, deadline - time.monotonic())
        return handovers

    def close(self) -> None:
        """Leave the pools; end the workers. Idempotent."""
        self._open.close()

    def workers(self) -> Sequence[WorkerState]:
        """Of this engine."""
        return () if self._supervisor is None else self._supervisor.poll()

    def _wait_for(self, pool: PrefillPool, channel: DialingChannel, timeout: float) -> None:
        """Until it serves. Whether it must not, or nobody is there, is another matter: who is not there may come."""
        try:
            wait_until(lambda: pool.ready, lambda: self._in_vain(pool, channel), timeout, pool.name)
        except EngineError:
            if (reason := self._in_vain(pool, channel)) is not None:
                raise (EngineError if self._crashing() else ModelError)(reason) from None
            reason = channel.problem(pool.peer) or f"prefill_pool: {pool.name} does not answer"
            logger.warning("%s; prompts are computed without it until it comes", reason)

    def _in_vain(self, pool: PrefillPool, channel: DialingChannel) -> str | None:
        """Why it cannot be used."""
        if pool.refusal is not None:
            return f"prefill_pool: {pool.name}: {pool.refusal}"
        if channel.refused(pool.peer):
            return channel.problem(pool.peer)
        down = (state for state in self.workers() if state.status == "failed" or state.restarts >= MAX_RESTARTS)
        return next((state.problem for state in down if state.problem), None)

    def _crashing(self) -> bool:
        """Whether it is the workers, not what they were given, that are to blame."""
        return self._supervisor is not None and all(state.status != "failed" for state in self.workers())


def prefill_command(config: EngineConfig, endpoint: str, name: str) -> list[str]:
    """The command line of a worker, which starts from the configuration of its engine, less the target's cores: a
    worker may not use them."""
    own = {"config": config_text(replace(config, cores="")), "listen": endpoint, "name": name}
    return [sys.executable, "-m", "pilotfish", "prefill", *(f"--{option}={value}" for option, value in own.items())]
