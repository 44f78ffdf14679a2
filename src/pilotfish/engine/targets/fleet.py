"""The targets of a server: processes that it starts, and those elsewhere that it is told of.

event loop        send, withdraw, revise ─►            Attend, twice a second      replicas, their requests
──────────────────────── posted, and called back: nobody waits ────────────────────────────────────────────
channel's thread  Beat: it lives                       the others: to the loop     silent, or cut off: to the loop
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Protocol

from pilotfish.config.engine import EngineConfig
from pilotfish.config.server import ServerConfig
from pilotfish.config.text import config_text
from pilotfish.core.cache.tiers import DEVICE
from pilotfish.core.peers.fields import Peer
from pilotfish.core.routing.held_prefixes import Held
from pilotfish.core.routing.router import Router
from pilotfish.engine.processes.launch import Supervisor, WorkerState
from pilotfish.engine.processes.process import WorkerSpec, command_of
from pilotfish.engine.targets.members import Member, Members, MembersFile, MembersThread
from pilotfish.engine.targets.replica import OwnTarget, Replica, RoutedTokens, num_own, own_targets
from pilotfish.engine.targets.stream import OpenRequest
from pilotfish.errors import ParameterError, WireError
from pilotfish.wire import serving as messages
from pilotfish.wire.channel import ChannelThread, Received, decoded, encode
from pilotfish.wire.curve_keys import KeyPair, TargetKeys, load_key_pair, load_target_keys
from pilotfish.wire.endpoints import Endpoint, check_private, check_spelling, dialled_endpoint
from pilotfish.wire.sockets import DialingChannel

logger = logging.getLogger(__name__)

#: Seconds that a target has to end: to end its draft workers, and to write KV to disk (`kv.tiers.FLUSH`).
GRACE = 20.0
#: Seconds between two looks, and between two tries to dial a target whose host has no address yet.
LOOK, REDIAL = 0.1, 1.0
CHANGE = 30.0  # seconds that a change of members may take


class FleetUser(Protocol):
    """Called by the event loop."""

    observe: Callable[[messages.StepReport, Sequence[messages.Delta]], None]  # called with each step of a target
    routed: RoutedTokens

    def failure(self, replica: Replica, failure: messages.Failure) -> None: ...

    def lost(self, requests: Sequence[OpenRequest], reason: str) -> None:
        """No target has these requests any more. `reason` is one line."""

    def moved(self, requests: Sequence[OpenRequest], reason: str) -> None:
        """The same, because a target has left as it was told to: the requests cannot be why."""

    def unfit(self, identity: messages.Identity) -> str:
        """Why a target cannot serve this server's requests; "" if it can."""

    def look(self) -> None:
        """Called often, and when a target has become ready."""


class Fleet:
    """Used from one event loop. A target of this server's own is restarted when it ends, and killed when it stands
    still for `target_timeout` seconds."""

    def __init__(
        self, config: EngineConfig, server: ServerConfig, user: FleetUser, environment: Mapping[str, str], own_name: str
    ) -> None:
        """`environment` is added to that of the started processes, which are called `own_name`."""
        self.replicas: list[Replica] = []
        self.routing = Router()  # by prefixes and load
        self.closed = False
        self._config, self._server, self._user = config, server, user
        self._environment, self._own_name = environment, own_name
        self._by_peer: dict[Peer, Replica] = {}
        self._next = 1
        self._key: KeyPair | None = None
        self._members = asyncio.Lock()
        self._file: MembersThread | None = None
        self._dialling: dict[Replica, asyncio.Task[None]] = {}  # of all replicas

    @property
    def taking(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.takes and not self.closed]

    @property
    def alone(self) -> bool:
        return len(self.replicas) == 1 and self.replicas[0].worker is not None

    @property
    def failed(self) -> bool:
        return bool(self.replicas) and all(replica.failed for replica in self.replicas)

    # -- from start to end

    async def start(self) -> None:
        """ParameterError for unusable addresses, keys and cores."""
        self._loop, server = asyncio.get_running_loop(), self._server
        self._supervisor = Supervisor(GRACE, lambda state: self._in_loop(partial(self._note_worker, state)))
        incarnation, insecure = secrets.token_bytes(8), self._config.insecure
        self._channel = DialingChannel((), incarnation, insecure=insecure, high_water=messages.WAITING, role="target")
        self._thread = ChannelThread(self._channel, LOOK)
        if server.target_key is not None:
            self._key = load_key_pair("target_key", server.target_key)
        elsewhere = await asyncio.to_thread(members_of, server, insecure)
        self._thread.start(self._receive, self._tick)
        for own in own_targets(self._config, num_own(self._config, server), self._own_name):
            self._start_own(own)
        if self._config.members is None:
            await self.set_members(elsewhere)
        else:
            await self._follow(MembersFile(self._config.members), elsewhere)

    def _start_own(self, own: OwnTarget) -> None:
        endpoint = f"ipc://{self._supervisor.directory}/{own.name.replace(' ', '-')}"
        self._add(Replica(Member(endpoint, name=own.name), time.monotonic, WorkerState(own.name)))
        command = command_of("target", listen=endpoint, name=own.name, config=config_text(own.config))
        self._supervisor.start([WorkerSpec(own.name, command, own.cores, self._environment)])

    async def _follow(self, file: MembersFile, fixed: Sequence[Member]) -> None:
        def tell(members: Members) -> None:
            change = self.set_members([*fixed, *members.targets])
            asyncio.run_coroutine_threadsafe(change, self._loop).result(CHANGE)

        await self.set_members([*fixed, *file.members.targets])
        self._file = MembersThread(file, tell)

    async def set_members(self, members: Sequence[Member]) -> None:
        """Of targets elsewhere. Others take the requests of one that left; one that drains gets no more, and leaves
        then."""
        async with self._members:
            if self.closed:
                return
            wanted = {member.endpoint: member for member in members}
            for replica in [replica for replica in self.replicas if replica.worker is None]:
                member = wanted.pop(replica.member.endpoint, None)
                if member is None or (member.key, member.label) != (replica.member.key, replica.name):
                    await self._remove(replica)
                else:
                    replica.draining = member.draining
            for member in wanted.values():
                if not member.draining:
                    self._add(Replica(member, time.monotonic))

    def _add(self, replica: Replica) -> None:
        self.replicas.append(replica)
        self._dialling[replica] = self._loop.create_task(self._dial(replica))

    async def _dial(self, replica: Replica) -> None:
        while True:
            try:
                keys = replica.member.keys(self._key, "target")
                where = await asyncio.to_thread(self._channel.checked, replica.member.endpoint, keys)
                break
            except ParameterError as error:
                if str(error) != replica.problem:
                    logger.warning("%s: it cannot be dialled yet: %s", replica.name, error)
                    replica.problem = str(error)
                await asyncio.sleep(REDIAL)
        await asyncio.wrap_future(self._thread.call(partial(self._connect, replica, where, keys)))
        replica.problem = ""

    async def _remove(self, replica: Replica) -> None:
        self.replicas.remove(replica)
        self._user.moved(self._taken_from(replica), f"{replica.name}: it has left")
        self.routing.forget(replica.id)
        dialling = self._dialling.pop(replica)
        dialling.cancel()
        await asyncio.wait([dialling])
        self._thread.call(partial(self._hang_up, replica))

    async def close(self, reason: str) -> None:
        """Ends this server's own targets; open requests are lost. Idempotent."""
        if self.closed:
            return
        self.closed = True
        for replica in self.replicas:
            self._drop(replica, reason)
        for dialling in self._dialling.values():
            dialling.cancel()
        if self._file is not None:
            await asyncio.to_thread(self._file.close)
        await asyncio.to_thread(self._supervisor.close)
        await asyncio.to_thread(self._thread.close)

    # -- requests

    def send(self, request: OpenRequest, replica: Replica) -> None:
        number, self._next = self._next, self._next + 1
        replica.requests[number] = request
        self._ask(replica, request.submit(number, replica.attendance.incarnation))

    def revise(self, request: OpenRequest) -> None:
        for replica, number in self._places(request):
            if replica.serving:
                self._ask(replica, messages.Revise(number, replica.attendance.incarnation, request.request.max_nodes))

    def withdraw(self, request: OpenRequest) -> None:
        for replica, number in self._places(request):
            self._take_from(replica, number)

    def _places(self, request: OpenRequest) -> list[tuple[Replica, int]]:
        return [(one, number) for one in self.replicas for number, other in one.requests.items() if other is request]

    def _take_from(self, replica: Replica, number: int) -> OpenRequest:
        request = self.ended(replica, number)
        if replica.serving:
            self._ask(replica, messages.Abort(number, replica.attendance.incarnation))
        return request

    def ended(self, replica: Replica, number: int) -> OpenRequest:
        request = replica.requests.pop(number)
        request.fingerprint = replica.fingerprint
        if request.route is not None:
            self.routing.ended(request.route)
            request.route = None
        return request

    def _taken_from(self, replica: Replica) -> list[OpenRequest]:
        return [self._take_from(replica, number) for number in list(replica.requests)]

    def _drop(self, replica: Replica, reason: str) -> None:
        if requests := self._taken_from(replica):
            self._user.lost(requests, reason)

    def _ask(self, replica: Replica, message: messages.Submit | messages.Abort | messages.Revise) -> None:
        replica.attendance.sent += 1
        self._post(replica, message)

    def _post(self, replica: Replica, message: messages.ToTarget) -> None:
        if replica.peer is not None:
            self._thread.post(replica.peer, encode(message))

    # -- the channel's thread

    def _connect(self, replica: Replica, where: Endpoint, keys: TargetKeys | None) -> None:
        replica.peer = self._channel.dial(where, keys)
        self._by_peer[replica.peer] = replica

    def _hang_up(self, replica: Replica) -> None:
        if replica.peer is not None:  # it was dialled before it left
            del self._by_peer[replica.peer]
            self._channel.hang_up(replica.peer)

    def _receive(self, received: Received) -> None:
        replica = self._by_peer.get(received.peer)
        if replica is None:
            return
        try:
            message = decoded(messages.SERVER_DECODER, received.frame)
        except WireError as error:
            logger.error("%s sent no message: %s", replica.name, error)
            return
        if isinstance(message, messages.Beat) and (replica.worker is None or message.pid == replica.worker.pid):
            replica.silence.heard()
            replica.step = message.step
        self._in_loop(lambda: self._handle(replica, message))

    def _tick(self) -> None:
        self._in_loop(self._attend)
        for replica in list(self.replicas):
            self._look(replica)

    def _look(self, replica: Replica) -> None:
        reason = replica.look(self._server.target_timeout)
        if replica.worker is not None:
            if reason and replica.worker.pid is not None:
                self._supervisor.kill(replica.worker.name, f"{reason} and is killed")
            return
        if replica.peer is None:
            return
        cut_off = self._channel.problem(replica.peer) or ""
        if reason or cut_off != replica.problem:
            self._in_loop(lambda: self._note_problem(replica, cut_off, reason))

    def _in_loop(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(call)

    # -- in the loop

    def _attend(self) -> None:
        if self.closed:
            return
        now, routes = time.monotonic(), len(self.replicas) > 1
        for replica in self.replicas:
            if not replica.serving or now - replica.attended >= messages.ATTEND:
                replica.attended = now
                self._post(replica, replica.attendance.attend(routes, self.routing.held.expected(replica.id)))
        for replica in [one for one in self.replicas if one.draining and not one.requests and one.worker is None]:
            self._loop.create_task(self._leave(replica))
        self._user.look()

    async def _leave(self, replica: Replica) -> None:
        async with self._members:
            if replica in self.replicas and replica.draining and not replica.requests:
                await self._remove(replica)

    def _note_worker(self, state: WorkerState) -> None:
        for replica in self.replicas:
            if replica.worker is not None and replica.worker.name == state.name and replica.note_worker(state):
                self._forgotten(replica, replica.obstacle)

    def _note_problem(self, replica: Replica, cut_off: str, reason: str) -> None:
        if bool(cut_off) != bool(replica.problem) and replica.serving:
            logger.warning("%s: %s", replica.name, cut_off or "it is there again")
        replica.problem = cut_off
        if cut_off or reason:
            self._drop(replica, f"{replica.name}: {cut_off or reason}")

    def _forgotten(self, replica: Replica, reason: str) -> None:
        self.routing.forget(replica.id)
        self._drop(replica, reason)

    def _handle(self, replica: Replica, message: messages.ToServer) -> None:
        if self.closed or replica not in self._dialling:  # it has left, and routing has forgotten it
            return
        if isinstance(message, messages.Status):
            self._take_status(replica, message)
        elif isinstance(message, messages.Declined):
            self._take_refusal(replica, message.reason)
        elif isinstance(message, Held):
            self.routing.held.apply(replica.id, message)
        elif isinstance(message, messages.Beat) and message.incarnation != replica.attendance.incarnation:
            self._take_news(replica, message.incarnation)
        elif replica.serving:
            if not replica.attendance.follows(message):
                self._drop(replica, f"{replica.name}: the connection to it broke off")
            if isinstance(message, messages.StepProgress):
                self._deliver(replica, message)
            elif isinstance(message, messages.Failure):
                self._user.failure(replica, message)

    def _deliver(self, replica: Replica, progress: messages.StepProgress) -> None:
        self._user.observe(progress.step, progress.deltas)
        for delta in progress.deltas:
            if (opened := replica.requests.get(delta.id)) is not None:
                if opened.route is not None and delta.queued is not None and not opened.begun:
                    found = delta.cached.get(DEVICE, 0)
                    self._user.routed.count(len(opened.request.tokens), opened.route.cached, found)
                opened.add(delta, progress.step)
                if opened.ended:
                    self.ended(replica, delta.id)

    def _take_news(self, replica: Replica, incarnation: str) -> None:
        if replica.serving and incarnation not in (replica.attendance.incarnation, replica.last):
            replica.forget()
            self._forgotten(replica, f"{replica.name}: it was started anew")

    def _take_status(self, replica: Replica, status: messages.Status) -> None:
        if status.incarnation == replica.last:
            return
        self._take_news(replica, status.incarnation)
        replica.note_status(status)
        unfit = self._user.unfit(status.identity)
        if unfit and unfit != replica.declined:
            logger.error("%s is not used: %s", replica.name, unfit)
        replica.declined = unfit
        self.routing.told(replica.id, status.load)
        self._user.look()

    def _take_refusal(self, replica: Replica, reason: str) -> None:
        if reason != replica.declined:
            logger.warning("%s declines: %s", replica.name, reason)
        if replica.serving:
            replica.forget()
            self.routing.forget(replica.id)
            left = self._user.lost if self.alone else self._user.moved
            left(self._taken_from(replica), f"{replica.name}: {reason}")
        replica.declined = reason


def members_of(server: ServerConfig, insecure: bool) -> list[Member]:
    """ParameterError for an invalid address or key, and for an address that needs keys and has none."""
    keys = load_target_keys(server.target_key, server.target_pool_key, len(server.target_pool), "target")
    for endpoint, known in zip(server.target_pool, keys, strict=True):
        check_spelling("target_pool", endpoint)
        try:
            where = dialled_endpoint("target_pool", endpoint)
        except ParameterError:  # its host has no address yet; it is looked at again when it has one
            continue
        check_private("target_pool", endpoint, where, known is not None or insecure)
    return [Member(e, "" if k is None else k.pool) for e, k in zip(server.target_pool, keys, strict=True)]
