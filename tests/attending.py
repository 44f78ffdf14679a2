"""A server of a target, as tests need one: it attends, asks and counts, without an engine behind it."""

import time
from typing import Any

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.targets.async_engine import AsyncEngine
from pilotfish.engine.targets.servers import Attendance
from pilotfish.engine.targets.stream import OpenRequest
from pilotfish.wire import serving
from pilotfish.wire.channel import Channel, decoded, encode

STEP = serving.StepReport(0.0, 0.0, 0.1, 0.0, 0.0, 1, 1, 0, 0, 1, 0, 0.1)
LIMIT = 60.0
TARGET = b"0"


def status(incarnation: str = "first") -> serving.Status:
    identity = serving.Identity("tiny", "off", "float32", 256, 512, 4096, 256, 8, 0)
    return serving.Status(identity, 0, 0, 4096, 0, incarnation)


def open_requests(engine: AsyncEngine) -> list[OpenRequest]:
    """Those that have not ended, wherever they are."""
    at_targets = [request for replica in engine._fleet.replicas for request in replica.requests.values()]
    return [*at_targets, *(request for request in engine._waiting if not request.ended)]


class AttendingServer:
    """Over a channel with one target."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.attendance = Attendance()
        self.heard: list[serving.ToServer] = []
        self.whole = True  # nothing was lost

    def tell(self, message: serving.ToTarget) -> None:
        self.channel.send(TARGET, encode(message))

    def submit(self, number: int, tokens: list[int], params: SamplingParams) -> None:
        self.attendance.sent += 1
        self.tell(serving.Submit(number, self.attendance.incarnation, serving.EngineRequest(tokens, params)))

    def abort(self, number: int) -> None:
        self.attendance.sent += 1
        self.tell(serving.Abort(number, self.attendance.incarnation))

    def hear(self) -> None:
        self.tell(self.attendance.attend())
        for received in self.channel.receive(serving.ATTEND):
            message = decoded(serving.SERVER_DECODER, received.frame)
            self.heard.append(message)
            numbered = isinstance(message, serving.Beat | serving.StepProgress | serving.Failure)
            if numbered and self.attendance.incarnation:
                self.whole &= self.attendance.follows(message)

    def until(self, kind: type[Any]) -> Any:
        """The first message of a kind."""
        deadline = time.monotonic() + LIMIT
        while not (found := [message for message in self.heard if isinstance(message, kind)]):
            assert time.monotonic() < deadline, f"no {kind.__name__} came"
            self.hear()
        return found[0]

    def join(self) -> serving.Status:
        """Attend until the target is ready, and from then on to this incarnation of it."""
        status: serving.Status = self.until(serving.Status)
        self.attendance = Attendance(status.incarnation)
        return status

    def deltas(self, number: int) -> list[serving.Delta]:
        told = [message for message in self.heard if isinstance(message, serving.StepProgress)]
        return [delta for message in told for delta in message.deltas if delta.id == number]

    def output(self, number: int) -> list[int]:
        """Tokens of a request with one output, once it has ended."""
        deadline = time.monotonic() + LIMIT
        while not any(delta.finish for delta in self.deltas(number)):
            assert time.monotonic() < deadline, f"request {number} does not end"
            self.hear()
        return [token for delta in self.deltas(number) for token in delta.tokens]
