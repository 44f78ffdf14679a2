"""Both ends of a connection, and their keys; all is closed after a test."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import zmq

from pilotfish.wire.curve_keys import KeyPair, PoolClient, PoolKeys, TargetKeys, new_key_pair
from pilotfish.wire.sockets import DialingChannel, ListeningChannel


@pytest.fixture(scope="session")
def identities() -> dict[str, KeyPair]:
    return {name: new_key_pair() for name in ("pool", "a", "b", "stranger")}


@pytest.fixture(scope="session")
def pool_keys(identities: dict[str, KeyPair]) -> PoolKeys:
    """The pool's, for which a and b may come."""
    allowed = {identities["a"].public: PoolClient("search", 3.0), identities["b"].public: PoolClient("chat", 1.0)}
    return PoolKeys(identities["pool"], allowed)


@pytest.fixture(scope="session")
def target_keys(identities: dict[str, KeyPair]) -> dict[str, TargetKeys]:
    return {name: TargetKeys(own, identities["pool"].public) for name, own in identities.items()}


@pytest.fixture
def _closed() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def listen(_closed: ExitStack) -> Callable[..., ListeningChannel]:
    return lambda *given, **options: _closed.enter_context(closing(ListeningChannel(*given, **options)))


@pytest.fixture
def dial(_closed: ExitStack) -> Callable[..., DialingChannel]:
    """Dials one pool or several."""

    def dial(endpoint: str | list[str], incarnation: bytes = b"run", *given: Any, **options: Any) -> DialingChannel:
        endpoints = [endpoint] if isinstance(endpoint, str) else endpoint
        return _closed.enter_context(closing(DialingChannel(endpoints, incarnation, *given, **options)))

    return dial


@pytest.fixture
def raw(_closed: ExitStack) -> Callable[..., Any]:
    """A socket of plain ZeroMQ with the given options."""
    context = zmq.Context()
    _closed.callback(context.term)

    def raw(kind: int, **options: Any) -> Any:
        socket = _closed.enter_context(context.socket(kind))
        socket.linger = 0
        for name, value in options.items():
            setattr(socket, name, value)
        return socket

    return raw


@pytest.fixture(params=["ipc", "tcp", "curve"])
def both(
    request: pytest.FixtureRequest,
    listen: Callable[..., ListeningChannel],
    dial: Callable[..., DialingChannel],
    pool_keys: PoolKeys,
    target_keys: dict[str, TargetKeys],
    tmp_path: Path,
) -> tuple[ListeningChannel, DialingChannel]:
    """A pool and a target of it, over every kind of connection."""
    keys = request.param == "curve"
    address = f"ipc://{tmp_path}/pool" if request.param == "ipc" else "tcp://127.0.0.1:0"
    listening = listen(address, pool_keys if keys else None)
    return listening, dial(listening.endpoint, b"run", [target_keys["a"]] if keys else [])
