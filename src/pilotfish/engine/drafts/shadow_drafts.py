"""Shadows: pools that are told of ended requests, and scored. Nothing of them is verified; the step loop never waits.

step loop         ended, observe: put down, without a lock
─────────────────────────────────────────────────────────────────────────────────────────────────────────
shadows' thread   turn: would-be steps of each machine (workers/target_shadow.py), at the pace of live ones
─────────────────────── the lock of each shadow's drafter, held for microseconds ────────────────────────
channel's thread  Tree: attach to the copy       Load: the pool lives
"""

import logging
import math
import secrets
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from pilotfish.config.engine import EngineConfig
from pilotfish.core.drafting.drafter import Drafter
from pilotfish.core.drafting.messages import Hello
from pilotfish.core.drafting.pools import DraftPool
from pilotfish.core.drafting.target_machine import RemoteOptions
from pilotfish.core.sampling.constraint import GrammarSource
from pilotfish.core.scheduling.budget import AdaptiveBudget, Budget, FixedBudget
from pilotfish.core.scheduling.calibration import StepCosts
from pilotfish.core.scheduling.executor import Executor
from pilotfish.core.scheduling.request import Request
from pilotfish.engine.pools.remote_pools import ANSWER, SWITCH_INTERVAL, salt_key
from pilotfish.engine.trial import KNOTS
from pilotfish.wire.channel import ChannelThread, Received
from pilotfish.wire.curve_keys import KeyPair, TargetKeys, load_key_pair, public_key
from pilotfish.wire.pool_users import RemoteDrafter
from pilotfish.wire.serving import ShadowReport
from pilotfish.wire.sockets import DialingChannel
from pilotfish.workers.records import StepRecord
from pilotfish.workers.target_shadow import LiveSteps, ShadowMachine, ShadowSetup

logger = logging.getLogger(__name__)

#: Seconds after which the shadows' thread looks for requests that have ended, at the latest.
PERIOD = 0.05
cpu_seconds = time.thread_time  # seconds of CPU time of the calling thread so far


@dataclass(frozen=True)
class ShadowedTarget:
    hello: Hello
    executor: Executor
    costs: StepCosts
    setup: ShadowSetup
    beside: Callable[[], Drafter]  # makes what would guess beside the draft if it were live
    grammars: GrammarSource


class Shadow:
    def __init__(self, pool: DraftPool, drafter: RemoteDrafter, machine: ShadowMachine) -> None:
        self.pool, self.drafter, self.machine = pool, drafter, machine
        self._failed = False
        self._turning = self._receiving = 0.0  # seconds of CPU time, of either thread

    def turn(self) -> float:
        if self._failed:
            return math.inf
        began = cpu_seconds()
        try:
            return self.machine.turn(time.monotonic(), self.pool.ready)
        except Exception:
            logger.exception("shadow_pool: %s is not scored any more: its steps could not be made", self.pool.name)
            self._failed = True
            return math.inf
        finally:
            self._turning += cpu_seconds() - began

    def receive(self, received: Received) -> None:
        began = cpu_seconds()
        self.drafter.receive(received)
        self._receiving += cpu_seconds() - began

    def report(self, live: LiveSteps) -> ShadowReport:
        score = self.machine.score
        sums = ("requests", "steps", "trees", "late", "accepted", "hits", "tried_by_depth", "accepted_by_depth")
        rates = ("tokens_per_step", "tokens_per_second")
        return ShadowReport(
            name=self.pool.name,
            ready=self.pool.ready and not self._failed,
            revision=self.pool.revision,
            **{name: getattr(score, name) for name in (*sums, *rates)},
            live_tokens_per_second=live.speed.value,
            error=live.error,
            cpu_seconds=self._turning + self._receiving,
        )


class ShadowDrafts:
    def __init__(self, config: EngineConfig) -> None:
        """ParameterError for a pool that cannot be dialled, and for unusable keys."""
        self._config = config
        self._shadows: Sequence[Shadow] = ()
        self._closing = threading.Event()
        self._open = ExitStack()
        own = None if config.draft_key is None else load_key_pair("draft_key", config.draft_key)
        self._options = RemoteOptions(config.wanted, salt_key=salt_key(own))
        incarnation, keys = secrets.token_bytes(8), _keys(config, own)
        self._channel = DialingChannel(config.shadow_pool, incarnation, keys, config.insecure, role="shadow")
        self._thread = ChannelThread(self._channel)
        self._open.callback(self._thread.close)

    def start(self, target: ShadowedTarget) -> None:
        self._live = LiveSteps(target.costs)
        self._shadows = [self._shadow(target, *pool) for pool in enumerate(self._config.shadow_pool)]
        self._open.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(SWITCH_INTERVAL)
        self._silent_until = time.monotonic() + ANSWER
        self._thread.start(self._receive, self._tick)
        steps = threading.Thread(target=self._run, name="shadows", daemon=True)
        steps.start()
        self._open.callback(steps.join)
        self._open.callback(self._closing.set)

    def _shadow(self, target: ShadowedTarget, number: int, endpoint: str) -> Shadow:
        pool = DraftPool(endpoint, str(number).encode(), role="shadow")
        drafter = RemoteDrafter(target.hello, [pool], self._thread.post, self._options, self._channel.problem)
        guesses = drafter, [target.beside()], self._budget(target)
        known = self._live, target.setup, target.grammars
        machine = ShadowMachine(target.executor, *guesses, *known, cpu_seconds)
        return Shadow(pool, drafter, machine)

    def _budget(self, target: ShadowedTarget) -> Budget:
        """As if the draft were live: an adaptive one learns from would-be steps, not from live ones."""
        config, executor = self._config, target.executor
        if config.budget == "fixed":
            return FixedBudget(config.nodes, config.levels)
        seconds = {rows: target.costs.at(rows) for rows in KNOTS if rows <= config.max_rows}
        return AdaptiveBudget(config.nodes, config.levels, StepCosts(seconds, executor.padded), 0.0)

    def close(self) -> None:
        self._open.close()

    # -- the step loop

    def observe(self, step: StepRecord) -> None:
        self._live.observe(step)

    def ended(self, request: Request) -> None:
        for shadow in self._shadows:
            shadow.machine.ended(request)

    def reports(self) -> list[ShadowReport]:
        return [shadow.report(self._live) for shadow in self._shadows]

    # -- the shadows' thread

    def _run(self) -> None:
        while not self._closing.is_set():
            self._live.take_in()
            due = min(shadow.turn() for shadow in self._shadows)
            self._closing.wait(min(max(due - time.monotonic(), 0.0), PERIOD))

    # -- the channel's thread

    def _receive(self, received: Received) -> None:
        for shadow in self._shadows:
            if shadow.pool.peer == received.peer:
                shadow.receive(received)

    def _tick(self) -> None:
        for shadow in self._shadows:
            shadow.drafter.tick()
        if self._silent_until < time.monotonic():
            self._silent_until = math.inf
            for pool in (shadow.pool for shadow in self._shadows):
                if not pool.ready and pool.refusal is None:
                    silent = f"shadow_pool: {pool.name}: not ready within {ANSWER:g} s"
                    logger.warning("%s; it is scored once it serves", self._channel.problem(pool.peer) or silent)


def _keys(config: EngineConfig, own: KeyPair | None) -> list[TargetKeys | None]:
    if not config.shadow_pool_key:
        return [None] * len(config.shadow_pool)
    assert own is not None  # EngineConfig checks it
    return [TargetKeys(own, public_key("shadow_pool_key", text)) for text in config.shadow_pool_key]
