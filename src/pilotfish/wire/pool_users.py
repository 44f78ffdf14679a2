"""A socket, a clock and a lock around the target's machine (core/drafting/target_machine.py). Imports no torch.

step loop         propose: the best nodes of each local copy        commit: re-root the copy; flush: post the tokens
───────────────────────────── one lock, held for microseconds ─────────────────────────────────────────────
channel's thread  Tree: attach to the copy       Load: the pool lives       Resync: open anew at the next step
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from pilotfish.core.drafting.drafter import Drafter, DraftLimits
from pilotfish.core.drafting.messages import Hello
from pilotfish.core.drafting.pools import DraftPool
from pilotfish.core.drafting.target_machine import RemoteOptions, TargetMachine
from pilotfish.core.features.feature_frames import frames_of, row_bytes
from pilotfish.core.features.features import FeatureSource, coded, feature_type
from pilotfish.core.peers.fields import Peer
from pilotfish.core.peers.peer import Dialer
from pilotfish.core.prefilling.prefill_pools import PrefillPool
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.tree import Forest, Guesses
from pilotfish.errors import UnknownTypeError, WireError
from pilotfish.wire.channel import Frame, Received, decode_to_target, send_all, type_of

logger = logging.getLogger(__name__)

AnyPool = TypeVar("AnyPool", bound=DraftPool | PrefillPool)


class PoolUser(ABC, Generic[AnyPool]):
    """A clock and a lock around a target's machine, which may be used between the beginning and the end of a turn."""

    def __init__(
        self,
        machine: Dialer[AnyPool],
        post: Callable[..., None],
        problem: Callable[[Peer], str | None],
        clock: Callable[[], float],
    ) -> None:
        """`post` sends frames to a peer, from any thread. `problem` tells why a pool is not connected."""
        self.machine = machine
        self._post, self._problem, self._clock = post, problem, clock
        self._lock = threading.Lock()  # held for microseconds

    @contextmanager
    def _turn(self) -> Iterator[float]:
        with self._lock:
            yield self._clock()
            send_all(self.machine.outbox, self._post)
            self._end_turn()
            for pool in self.machine.pools:
                for notice in pool.notices:
                    logger.log(notice.level, "%s", notice.text)
                pool.notices.clear()

    def _end_turn(self) -> None:
        """With the lock."""

    # -- the channel's thread

    def join(self, pool: AnyPool) -> None:
        with self._turn():
            self.machine.join(pool)

    def drain(self, pool: AnyPool, draining: bool) -> None:
        with self._turn():
            self.machine.drain(pool, draining)

    def leave(self, pool: AnyPool) -> None:
        with self._turn():
            self.machine.leave(pool)

    def tick(self) -> None:
        with self._turn() as now:
            for pool in self.machine.pools:
                if (problem := self._problem(pool.peer)) is not None:
                    self.machine.lost(pool, problem)
            self.machine.tick(now)

    def receive(self, received: Received) -> None:
        """Decodes before it takes the lock."""
        if (pool := self.machine.pool_at(received.peer)) is not None:
            take_in = self._decoded(pool, received.frame)
            with self._turn() as now:
                take_in(now)

    @abstractmethod
    def _decoded(self, pool: AnyPool, frame: Frame) -> Callable[[float], None]:
        """What the machine does with it."""


class RemoteDrafter(PoolUser[DraftPool], Drafter):
    machine: TargetMachine

    def __init__(
        self,
        hello: Hello,
        pools: Sequence[DraftPool],
        post: Callable[..., None],
        options: RemoteOptions,
        problem: Callable[[Peer], str | None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        source: FeatureSource | None = None,
    ) -> None:
        """Only the step loop's thread reads `source`, which has the features that `hello` offers."""
        super().__init__(TargetMachine(hello, pools, options), post, problem, clock)
        self._source, self._offer = source, hello.features

    @property
    def ready(self) -> bool:
        return all(pool.ready for pool in self.machine.pools)

    # -- the step loop: the Drafter protocol

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[Guesses]:
        with self._lock:
            return self.machine.propose(requests, limits.nodes, self._clock())

    def expect(self, requests: Sequence[Request]) -> None:
        with self._turn() as now:
            self.machine.expect(requests, now)

    def verified(self, requests: Sequence[Request], trees: Forest) -> None:
        with self._lock:
            self.machine.verified(requests, trees)

    def commit(self, request: Request, tokens: Sequence[int]) -> bool:
        """The next `flush` or message tells the draft."""
        with self._lock:
            return self.machine.commit(request, tokens, self._clock())

    def gather(self) -> None:
        """Features that are due, read without the lock."""
        if self._source is None or self._offer is None:
            return
        kind = feature_type(self._offer.dtype)
        with self._lock:
            pieces = self.machine.due_features(row_bytes(self._offer.width, kind), self._clock())
        if pieces:
            found = self._source(np.concatenate([piece.slots for piece in pieces]))
            frames = frames_of(pieces, coded(found, kind), kind)
            with self._lock:
                self.machine.send_features(pieces, frames, self._clock())

    def flush(self) -> None:
        """Posts messages."""
        with self._turn():
            pass

    def pause(self, request: Request) -> None:
        with self._turn():
            self.machine.pause(request)

    def close(self, request: Request) -> None:
        with self._turn():
            self.machine.close(request)

    def pool_of(self, request: Request) -> DraftPool | None:
        with self._lock:
            session = self.machine.session(request)
            return None if session is None else session.pool

    # -- the channel's thread

    def _decoded(self, pool: DraftPool, frame: Frame) -> Callable[[float], None]:
        try:
            return partial(self.machine.receive, pool, decode_to_target(frame))
        except UnknownTypeError as error:
            return partial(self.machine.unknown, pool, error.kind)
        except WireError as error:
            return partial(self.machine.malformed, pool, str(error), about=type_of(frame))
