"""Drafts that run elsewhere: a socket, a clock and a lock around the target's machine (core/target_machine.py).

step loop         propose: the best nodes of each local copy        commit: re-root the copy, post the tokens
───────────────────────────── one lock, held for microseconds ─────────────────────────────────────────────
channel's thread  Tree: attach to the copy       Load: the pool lives       Resync: open anew at the next step
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pilotfish.core.drafter import DraftLimits
from pilotfish.core.messages import Hello, Peer, PushedNodes, Tree
from pilotfish.core.pools import DraftPool
from pilotfish.core.request import Request
from pilotfish.core.target_machine import RemoteOptions, TargetMachine
from pilotfish.core.tree import TokenTree
from pilotfish.errors import WireError
from pilotfish.wire.channel import Received, decode_to_target, encode

logger = logging.getLogger(__name__)


class RemoteDrafter:
    """Implements `Drafter` over the trees that pools push. The target waits for nothing here."""

    levels = 0  # of a draft they cost the target nothing

    def __init__(
        self,
        hello: Hello,
        pools: Sequence[DraftPool],
        post: Callable[[Peer, bytes], None],
        options: RemoteOptions,
        problem: Callable[[Peer], str | None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`post` sends a frame; from any thread, without waiting. `problem` tells why a pool is not connected."""
        self.machine = TargetMachine(hello, pools, options)
        self._post = post
        self._problem = problem
        self._clock = clock
        self._lock = threading.Lock()

    @contextmanager
    def _turn(self) -> Iterator[float]:
        """The machine's turn, and the present time for it. Its messages are posted in order."""
        with self._lock:
            yield self._clock()
            for outgoing in self.machine.outbox:
                self._post(outgoing.peer, encode(outgoing.message))
            self.machine.outbox.clear()
            for pool in self.machine.pools:
                for notice in pool.notices:
                    logger.log(notice.level, "%s", notice.text)
                pool.notices.clear()

    # -- the step loop: the Drafter protocol

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[TokenTree]:
        with self._turn() as now:
            return self.machine.propose(requests, limits.nodes, now)

    def commit(self, request: Request, tokens: Sequence[int]) -> bool:
        with self._turn() as now:
            return self.machine.commit(request, tokens, now)

    def close(self, request: Request) -> None:
        with self._turn():
            self.machine.close(request)

    def pool_of(self, request: Request) -> DraftPool | None:
        """The pool that drafts for it now."""
        with self._lock:
            session = self.machine.session(request)
            return None if session is None else session.pool

    # -- the channel's thread

    def tick(self) -> None:
        """Called often: greets the pools now and then. One that is not connected need not be silent first."""
        with self._turn() as now:
            for pool in self.machine.pools:
                if (problem := self._problem(pool.peer)) is not None:
                    pool.disconnected(problem)
            self.machine.tick(now)

    def receive(self, received: Received) -> None:
        """A frame from a pool. It is decoded before the step loop has to wait."""
        pool = self.machine.pool_at(received.peer)
        if pool is None:
            return
        try:
            message = decode_to_target(received.frame)
        except WireError as error:
            with self._turn() as now:
                pool.malformed(str(error), now)
            return
        heard = PushedNodes.of(message) if isinstance(message, Tree) else message
        with self._turn() as now:
            self.machine.receive(pool, heard, now)
