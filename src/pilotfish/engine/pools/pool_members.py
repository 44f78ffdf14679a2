import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Generic

from msgspec.structs import replace

from pilotfish.core.peers.fields import Peer
from pilotfish.engine.targets.members import Member
from pilotfish.errors import InputError
from pilotfish.wire.channel import ChannelThread
from pilotfish.wire.curve_keys import KeyPair
from pilotfish.wire.endpoints import Endpoint
from pilotfish.wire.pool_users import AnyPool, PoolUser
from pilotfish.wire.sockets import DialingChannel

logger = logging.getLogger(__name__)

CHANGE = 30.0  # seconds that the channel's thread has to take in a change


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
