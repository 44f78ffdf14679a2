"""Imports no torch."""

import os
from collections.abc import Callable, Sequence

from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import least_sent, model_name
from pilotfish.core.prefilling.handover_machine import HandOverMachine
from pilotfish.core.prefilling.prefill_messages import PREFILL_VERSION, PrefillHello
from pilotfish.core.prefilling.prefill_pools import PrefillPool
from pilotfish.core.prefilling.segments import KVIdentity
from pilotfish.engine.pools.remote_pools import RemotePools, salt_key
from pilotfish.engine.prefills.handovers import HandOvers, WriteLayers
from pilotfish.engine.processes.placement import split_for_prefill
from pilotfish.engine.processes.process import keep_freed_memory
from pilotfish.engine.targets.members import Member

#: Seconds between two looks at greetings and leases.
TICK = 0.05


class RemotePrefills(RemotePools[PrefillPool]):
    role, without, must_answer = "prefill", "prompts are computed without it until it comes", False
    handovers: HandOvers  # once `connect` has made them

    def __init__(self, config: EngineConfig, taken: frozenset[int] = frozenset()) -> None:
        """`taken` are cores of draft workers. ParameterError for cores that cannot be used."""
        super().__init__(config, config.prefill_pool)
        self.cores = frozenset[int]()  # the target's own business, unless workers are started
        if config.prefill_workers:
            free = frozenset(os.sched_getaffinity(0)) - taken
            cores, workers = config.prefill_cores, config.prefill_workers
            self._start_workers(split_for_prefill(free, config.cores, cores, workers, taken))

    def connect(self, identity: Callable[[], KVIdentity], write: WriteLayers) -> HandOvers:
        """Returns once every pool serves, as `wait` says."""
        config = self._config
        self._make_channel(config.prefill_key, config.prefill_pool_key, TICK)
        machine = HandOverMachine(None, (), least_sent(config.prefill_threshold), salt_key(self._own))
        handovers = self.handovers = HandOvers(
            machine, write, self._thread.post, self._channel.problem, config.prefill_transports
        )
        self._identity = identity
        self._open.callback(handovers.close)
        keep_freed_memory()
        self._start_channel(
            handovers, lambda member, peer: PrefillPool(member.label, peer, scheme=member.endpoint.partition(":")[0])
        )
        if self.endpoints:
            self._introduce()
        self._dial()
        self.wait(optional=False)
        return handovers

    def set_pools(self, members: Sequence[Member]) -> None:
        if members:
            self._introduce()
        super().set_pools(members)

    def _introduce(self) -> None:
        """The identity takes seconds to find if weights are large."""
        if self.handovers.machine.greeting is None:
            greeting = PrefillHello(PREFILL_VERSION, self._identity(), model_name(self._config.target))
            self.handovers.machine.greeting = greeting

    def _in_vain(self, pool: PrefillPool) -> str | None:
        if pool.refusal is not None:
            return f"prefill_pool: {pool.name}: {pool.refusal}"
        if self._channel.refused(pool.peer):
            return self._channel.problem(pool.peer)
        return self._worker_down()
