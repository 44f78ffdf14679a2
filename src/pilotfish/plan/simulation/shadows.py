"""Shadows in virtual time: drafts that see what a simulated target has written, and guess for nobody."""

from __future__ import annotations

import math
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from pilotfish.core.drafting.messages import ToDraft, ToTarget
from pilotfish.core.drafting.shadow import ShadowScore
from pilotfish.core.peers.fields import Peer
from pilotfish.core.scheduling.request import Request
from pilotfish.plan.simulation.acceptance import AcceptanceTrace
from pilotfish.plan.simulation.drafts import PooledDrafter, VirtualPool, pool_peer
from pilotfish.plan.simulation.events import Events
from pilotfish.plan.simulation.models import Cost, Replay
from pilotfish.plan.simulation.setup import Setup
from pilotfish.plan.simulation.target import VirtualTarget, budget_over, costs_of
from pilotfish.workers.ngram import NgramDrafter
from pilotfish.workers.records import StepRecord
from pilotfish.workers.target_shadow import LiveSteps, ShadowMachine, ShadowSetup


class SimulatedShadow(Struct, frozen=True):
    """A draft in a pool of its own, of which a target knows only as its shadow."""

    draft: Cost  # seconds of its forwards
    trace: AcceptanceTrace  # of the target's own tokens: what the shadow would have guessed
    share: float = 1.0  # of the requests that it is told of


class VirtualShadow:
    """That of one target, and its pool."""

    def __init__(
        self, events: Events, replay: Replay, setup: Setup, shadow: SimulatedShadow, target: VirtualTarget
    ) -> None:
        speculation = replace(setup.speculation, mode="async")
        own = replace(setup, draft=shadow.draft, pools=1, speculation=speculation)
        self._events, self._delay = events, setup.host.hop + setup.delay
        self._pool = VirtualPool(events, replay.beside(shadow.trace), own, self._to_target)
        vocab_size = shadow.trace.pair.vocab_size
        self._drafter = PooledDrafter(own, 0, vocab_size, lambda: events.now, self._to_pool)
        self._live = LiveSteps(costs_of(own))
        limits = ShadowSetup(
            setup.kv_slots, setup.max_rows, setup.max_requests, prefix_cache=setup.prefix_cache, share=shadow.share
        )
        beside, budget = [NgramDrafter()] * speculation.ngrams, budget_over(costs_of(own), speculation)
        self._machine = ShadowMachine(target.worker.executor, self._drafter, beside, budget, self._live, limits)
        self._planned = False  # the next turn

    @property
    def ready(self) -> bool:
        return self._drafter.ready

    @property
    def busy(self) -> bool:
        """Whether it follows a request."""
        return self._planned

    @property
    def score(self) -> ShadowScore:
        return self._machine.score

    @property
    def live(self) -> LiveSteps:
        """What it knows of its target."""
        return self._live

    def observe(self, step: StepRecord) -> None:
        self._live.observe(step)
        self._live.take_in()

    def ended(self, request: Request) -> None:
        """A request of the target has."""
        self._machine.ended(request)
        if not self._planned:
            self._plan(self._events.now)

    def tick(self, now: float) -> None:
        """Called now and then."""
        self._drafter.tick(now)
        self._pool.tick()

    def _plan(self, when: float) -> None:
        self._planned = when < math.inf
        if self._planned:
            self._events.at(when, lambda: self._plan(self._machine.turn(self._events.now, self.ready)))

    def _to_pool(self, _: Peer, message: ToDraft) -> None:
        self._events.at(self._events.now + self._delay, partial(self._pool.deliver, b"target", message))

    def _to_target(self, _: Peer, message: ToTarget) -> None:
        receive = partial(self._drafter.receive, pool_peer(0), message)
        self._events.at(self._events.now + self._delay, lambda: receive(self._events.now))
