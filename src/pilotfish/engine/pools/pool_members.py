import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Generic, TypeVar

from msgspec.structs import replace

from pilotfish.core.drafting.pools import DraftPool
from pilotfish.core.peers.fields import Peer
from pilotfish.core.peers.peer import Dialer
from pilotfish.core.prefilling.prefill_pools import PrefillPool
from pilotfish.engine.targets.members import Member
from pilotfish.errors import InputError
from pilotfish.wire.channel import ChannelThread, Frame, Received, send_all
from pilotfish.wire.curve_keys import KeyPair
from pilotfish.wire.endpoints import Endpoint
from pilotfish.wire.sockets import DialingChannel

logger = logging.getLogger(__name__)

CHANGE = 30.0  # seconds that the channel's thread has to take in a change

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


class PoolMembers(Generic[AnyPool]):
    """Dials on the channel's thread. For one caller at a time. A pool with another endpoint, key or name is another
    pool."""

    def __init__(
        self,
        channel: DialingChannel,
        thread: ChannelThread,
        own: KeyPair | None,
        make: Callable[[Member, Peer], AnyPool],
        user: PoolUser[AnyPool],
    ) -> None:
        self._channel, self._thread, self._own, self._make, self._user = channel, thread, own, make, user
        self._pools: dict[Member, AnyPool] = {}  # none of the members draining
        self._problems: dict[Member, str] = {}

    def begin(self, members: Sequence[Member]) -> None:
        """ParameterError for a member that cannot be dialled."""
        self._change(dict.fromkeys(members, False), {member: self._checked(member) for member in members})

    def set(self, members: Sequence[Member]) -> None:
        """A member that cannot be dialled gives one log line, and is tried again at the next call."""
        wanted = {replace(member, draining=False): member.draining for member in members}
        self._problems = {member: problem for member, problem in self._problems.items() if member in wanted}
        before = {member: pool.draining for member, pool in self._pools.items()}
        new = [member for member in wanted if member not in self._pools]
        self._change(wanted, {})
        for member in sorted(new, key=self._problems.__contains__):  # looking up what was not there may take long
            if (where := self._found(member)) is not None:
                self._change(wanted, {member: where})
        self._log(before)

    def _checked(self, member: Member) -> Endpoint:
        return self._channel.checked(member.endpoint, member.keys(self._own, self._channel.role))

    def _found(self, member: Member) -> Endpoint | None:
        try:
            where = self._checked(member)
        except InputError as error:
            if self._problems.get(member) != str(error):
                self._problems[member] = str(error)
                logger.warning("%s; it is tried again", error)
            return None
        self._problems.pop(member, None)
        return where

    def _change(self, wanted: Mapping[Member, bool], found: Mapping[Member, Endpoint]) -> None:
        self._thread.call(partial(self._apply, wanted, found)).result(CHANGE)

    def _apply(self, wanted: Mapping[Member, bool], found: Mapping[Member, Endpoint]) -> None:
        for member in [member for member in self._pools if member not in wanted]:
            pool = self._pools.pop(member)
            self._user.leave(pool)
            self._channel.hang_up(pool.peer)
        for member, where in found.items():
            if member not in self._pools:
                peer = self._channel.dial(where, member.keys(self._own, self._channel.role))
                self._pools[member] = self._make(member, peer)
                self._user.join(self._pools[member])
        for member, pool in self._pools.items():
            if pool.draining != wanted[member]:
                self._user.drain(pool, wanted[member])

    def _log(self, before: Mapping[Member, bool]) -> None:
        now, role = {member: pool.draining for member, pool in self._pools.items()}, self._channel.role
        for member in [member for member in before if member not in now]:
            logger.info("%s pool %s has left", role, member.label)
        for member in now:
            if member not in before:
                logger.info("%s pool %s joins%s", role, member.label, ", to drain" if now[member] else "")
            elif now[member] != before[member]:
                logger.info("%s pool %s %s", role, member.label, "drains" if now[member] else "stays")
