"""Frames between targets and a draft pool: seen on their way, kept in a file, shown as lines.

target ──► listen │ Tap │ ──► pool        each frame on either way is a TappedFrame, and goes on as it came
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import msgspec
import zmq
from msgspec import Struct

from pilotfish.errors import InputError, ParameterError, WireError
from pilotfish.printable import printable
from pilotfish.wire.channel import HIGH_WATER, Frame, decode_to_draft, decode_to_target
from pilotfish.wire.endpoints import Endpoint

Side = Literal["target", "draft"]
#: Targets that a tap passes on; others are not heard.
MAX_TARGETS = 256
#: Elements of a list that are shown, and characters of a text.
SHOWN, TEXT = 8, 80


class TappedFrame(Struct, frozen=True):
    at: float  # seconds since the recording began
    sender: Side
    target: str  # its incarnation, in hex
    frame: str  # in base64

    @classmethod
    def of(cls, at: float, sender: Side, incarnation: bytes, frame: bytes) -> TappedFrame:
        return cls(round(at, 6), sender, incarnation.hex(), base64.b64encode(frame).decode())

    @property
    def data(self) -> bytes:
        """ValueError for what is no base64."""
        return base64.b64decode(self.frame, validate=True)


def recorded(file: Path) -> Iterator[TappedFrame]:
    """InputError for a file that is no recording."""
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                yield _line(line, file, number)
    except OSError as error:
        raise InputError(f"file: {file} cannot be read: {error.strerror}") from error


def _line(line: bytes, file: Path, number: int) -> TappedFrame:
    try:
        tapped = msgspec.json.decode(line, type=TappedFrame)
        tapped.data  # noqa: B018
    except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
        raise InputError(f"file: {file}, line {number} is no recorded frame: {error}") from error
    return tapped


def described(tapped: TappedFrame) -> dict[str, Any]:
    """Long values are shortened; `problem` where it is no message."""
    data = tapped.data
    fields = _fields(data)
    problem = _problem(data, tapped.sender)
    head = {"at": tapped.at, "from": tapped.sender, "target": tapped.target[:16], "bytes": len(data)}
    return {**head, **{name: _short(value) for name, value in fields.items()}, **problem}


def _fields(data: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.msgpack.decode(data, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        return {}
    return {printable(str(name))[:TEXT]: value for name, value in fields.items()} if isinstance(fields, dict) else {}


def _problem(data: Frame, sender: Side) -> dict[str, str]:
    try:
        decode_to_draft(data) if sender == "target" else decode_to_target(data)
    except WireError as error:
        return {"problem": printable(str(error))}
    return {}


def _short(value: Any) -> Any:
    if isinstance(value, bytes):
        return value[:TEXT].hex() + ("…" if len(value) > TEXT else "")
    if isinstance(value, str):
        return printable(value)[:TEXT]
    if isinstance(value, dict):
        return {printable(str(name))[:TEXT]: _short(part) for name, part in list(value.items())[:SHOWN]}
    if isinstance(value, list) and len(value) > SHOWN:
        return [*map(_short, value[: SHOWN // 2]), f"… {len(value)} in all"]
    return list(map(_short, value)) if isinstance(value, list) else value


class Tap:
    """Stands between targets, which dial `listen`, and a pool. Without keys only: it could not read the frames."""

    def __init__(self, listen: Endpoint, pool: Endpoint) -> None:
        """ParameterError where it cannot listen."""
        self._pool = pool
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self._router.set_hwm(HIGH_WATER)
        try:
            self._router.bind(listen.url)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            reason = f"an address that can be listened at ({zmq.strerror(error.errno or 0)})"
            raise ParameterError("listen", listen.url, reason) from error
        self.endpoint = self._router.get_string(zmq.LAST_ENDPOINT)
        self._dealers: dict[bytes, zmq.Socket[bytes]] = {}  # by route
        self._incarnations: dict[bytes, bytes] = {}
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._context.destroy(0)

    def turn(self, seconds: float, seen: Callable[[TappedFrame], None]) -> None:
        poller = zmq.Poller()
        for socket in (self._router, *self._dealers.values()):
            poller.register(socket, zmq.POLLIN)
        ready = dict(poller.poll(int(1000 * seconds)))
        if self._router in ready:
            self._from_target(self._router.recv_multipart(), seen)
        for route, dealer in self._dealers.items():
            if dealer in ready:
                frames = dealer.recv_multipart()
                self._tell("draft", route, frames, seen)
                _pass_on(self._router, [route, *frames])

    def _from_target(self, parts: list[bytes], seen: Callable[[TappedFrame], None]) -> None:
        route, incarnation, *frames = (*parts, b"") if len(parts) == 1 else parts
        if route not in self._dealers:
            if len(self._dealers) >= MAX_TARGETS:
                return
            self._dealers[route] = dealer = self._context.socket(zmq.DEALER)
            dealer.linger = 0
            dealer.set_hwm(HIGH_WATER)
            dealer.connect(self._pool.url)
        self._incarnations[route] = incarnation
        self._tell("target", route, frames, seen)
        _pass_on(self._dealers[route], [incarnation, *frames])

    def _tell(self, sender: Side, route: bytes, frames: list[bytes], seen: Callable[[TappedFrame], None]) -> None:
        at = time.monotonic() - self._began
        for frame in frames:
            seen(TappedFrame.of(at, sender, self._incarnations[route], frame))


def _pass_on(socket: zmq.Socket[bytes], parts: list[bytes]) -> None:
    """A connection may lose it."""
    try:
        socket.send_multipart(parts, zmq.NOBLOCK)
    except zmq.ZMQError:
        return
