"""Who attends a target only to know how it does."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable

from pilotfish.core.routing.autoscaling import demand
from pilotfish.engine.targets.attendance import Attendance
from pilotfish.engine.targets.silence import Silence
from pilotfish.wire.channel import ChannelThread, Received, decoded, encode
from pilotfish.wire.curve_keys import TargetKeys
from pilotfish.wire.serving import ATTEND, SERVER_DECODER, Beat, Status
from pilotfish.wire.sockets import DialingChannel

#: Its peer name on the channel.
TARGET = b"0"
#: Seconds between two looks at the channel.
TICK = 0.1


class Attendant:
    """From construction to `close`. `silent` is called, on a thread, with the seconds that a target was not heard which
    has served, once they are more than `limit`."""

    def __init__(
        self, endpoint: str, keys: TargetKeys | None, insecure: bool, limit: float, silent: Callable[[float], None]
    ) -> None:
        self.status: Status | None = None  # the last one
        self._limit, self._silent = limit, silent
        self._silence = Silence()
        self._attended = -ATTEND
        channel = DialingChannel([endpoint], secrets.token_bytes(16), [keys], insecure, role="target")
        self._thread = ChannelThread(channel, TICK)
        self._thread.start(self._receive, self._look)

    @property
    def demand(self) -> float:
        if (status := self.status) is None:
            return 0.0
        slots = status.identity.kv_slots
        requests = status.running + status.waiting
        return demand(requests, status.identity.max_requests, slots - status.free_slots, slots)

    def close(self) -> None:
        self._thread.close()

    def _receive(self, received: Received) -> None:
        message = decoded(SERVER_DECODER, received.frame)
        if isinstance(message, Beat):
            self._silence.heard()
        elif isinstance(message, Status):
            self.status = message

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._attended >= ATTEND:
            self._attended = now
            self._thread.post(TARGET, encode(Attendance().attend()))
        seconds = self._silence.look(now)
        if seconds > self._limit and self.status is not None:
            self.status = None
            self._silent(seconds)
