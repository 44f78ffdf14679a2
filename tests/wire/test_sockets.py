"""Channels over real sockets: what is sent arrives, in order, or is known to be lost."""

import resource
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from ends import LONG, connect, exactly, introduce, silent, until

from pilotfish.core.peers.fields import MAX_FRAME
from pilotfish.errors import ParameterError
from pilotfish.wire import sockets as sockets_module
from pilotfish.wire.channel import HIGH_WATER, LARGE, MAX_FRAMES, Channel
from pilotfish.wire.curve_keys import PoolKeys
from pilotfish.wire.sockets import DialingChannel, ListeningChannel

Both = tuple[ListeningChannel, DialingChannel]
Listen = Callable[..., ListeningChannel]
Dial = Callable[..., DialingChannel]
ANY_PORT = "tcp://127.0.0.1:0"


def test_order_holds_both_ways(both: Both) -> None:
    listening, dialing = both
    peer = introduce(dialing, listening).peer
    frames = [str(i).encode() for i in range(700)]
    assert all(dialing.send(b"0", frame) for frame in frames)
    assert [received.frame for received in exactly(len(frames), listening)] == frames
    assert all(listening.send(peer, frame) for frame in frames)
    assert [received.frame for received in exactly(len(frames), dialing)] == frames


def test_frames_of_one_message_arrive_in_order(both: Both) -> None:
    listening, dialing = both
    peer = introduce(dialing, listening).peer
    assert dialing.send(b"0", b"one", b"two", b"three")
    assert [received.frame for received in exactly(3, listening)] == [b"one", b"two", b"three"]
    assert listening.send(peer, b"four", b"five")
    assert [received.frame for received in exactly(2, dialing)] == [b"four", b"five"]


def test_large_frames_come_as_they_were_sent(both: Both) -> None:
    """Also after those that sent them have let them go, and beside small ones."""
    listening, dialing = both
    peer = introduce(dialing, listening).peer
    sizes = [LARGE - 1, LARGE, 0, LARGE + 1, 5 * LARGE]
    for seed in range(20):
        assert listening.send(peer, *(bytes([seed]) * size for size in sizes))
    received = exactly(20 * len(sizes), dialing)
    assert [one.frame for one in received] == [bytes([seed]) * size for seed in range(20) for size in sizes]
    assert {type(one.frame) for one in received if len(one.frame) >= LARGE} == {memoryview}


def test_what_has_come_when_something_is_sent_is_received(both: Both) -> None:
    """Sending may take note of it, and the system then has nothing more to tell."""
    listening, dialing = both
    peer = introduce(dialing, listening).peer
    assert silent(dialing, listening)
    for here, to, there, back in ((listening, peer, dialing, b"0"), (dialing, b"0", listening, peer)):
        assert here.send(to, b"first")
        for number in range(3):
            time.sleep(0.01)  # ZeroMQ looks at what has come some times a second while one sends
            assert there.send(back, b"%d" % number)
        assert [one.frame for one in there.receive(LONG)] == [b"first"]
        assert len(exactly(3, here)) == 3


def test_what_has_come_when_nothing_could_be_sent_is_received(listen: Listen, dial: Dial) -> None:
    listening = listen(ANY_PORT)
    here, gone = (dial(listening.endpoint, name) for name in (b"here", b"gone"))
    peers = [introduce(dialing, listening).peer for dialing in (here, gone)]
    assert silent(here, gone, listening)
    gone.close()
    until(lambda: not listening.send(peers[1], b"x"), here)
    time.sleep(0.01)
    assert here.send(b"0", b"first")
    time.sleep(0.01)
    listening._routes[b""][peers[1]] = b"\0none"  # as if it were not known yet
    assert not listening.send(peers[1], b"x")
    assert [one.frame for one in listening.receive(LONG)] == [b"first"]


def test_only_connections_between_hosts_are_kept_alive(both: Both) -> None:
    """By the system: a heartbeat of ZeroMQ would take the connection of a process that is stopped for a while, and what
    is on the way; and libzmq aborts a process with heartbeats whose peer floods it and hangs up (`!_io_error`)."""
    sockets = [socket for channel in both for socket in channel._handlers if socket.type in (zmq.ROUTER, zmq.DEALER)]
    within = both[0].endpoint.startswith("ipc:")
    assert [socket.heartbeat_ivl for socket in sockets] == [0, 0]
    assert [socket.tcp_keepalive for socket in sockets] == [-1 if within else 1] * 2
    assert [socket.tcp_maxrt for socket in sockets] == [0 if within else 10_000] * 2


def test_several_targets_and_several_pools(listen: Listen, dial: Dial) -> None:
    pools = [listen(ANY_PORT), listen(ANY_PORT)]
    targets = [dial([pool.endpoint for pool in pools], name) for name in (b"one", b"two")]
    for target in targets:
        for i in range(2):
            connect(target, pool=str(i).encode())
            until(lambda t=target, n=i: t.send(str(n).encode(), b"to %d" % n), target)  # type: ignore[misc]
    for i, pool in enumerate(pools):
        received = exactly(2, pool)
        assert {(r.peer, r.frame) for r in received} == {(b"one", b"to %d" % i), (b"two", b"to %d" % i)}
        assert all(pool.send(r.peer, r.peer + b" from %d" % i) for r in received)
    for target, name in zip(targets, (b"one", b"two"), strict=True):
        assert {(r.peer, r.frame) for r in exactly(2, target)} == {(b"0", name + b" from 0"), (b"1", name + b" from 1")}


def test_nobody_listens(dial: Dial, tmp_path: Path) -> None:
    dialing = dial(f"ipc://{tmp_path}/nobody")
    assert "has not answered yet" in (dialing.problem(b"0") or "")
    assert not dialing.send(b"0", b"lost") and not dialing.send(b"1", b"no such pool")
    until(lambda: "nobody answers at" in (dialing.problem(b"0") or ""), dialing)


def test_what_was_lost_does_not_come_later(listen: Listen, dial: Dial, tmp_path: Path) -> None:
    dialing = dial(f"ipc://{tmp_path}/pool")
    assert not dialing.send(b"0", b"lost")
    assert introduce(dialing, listen(f"ipc://{tmp_path}/pool"), b"kept").frame == b"kept"


def test_peers_that_are_unknown_or_gone(both: Both) -> None:
    listening, dialing = both
    peer = introduce(dialing, listening).peer
    assert not listening.send(b"foreign", b"") and not listening.send(b"", b"") and listening.send(peer, b"")
    dialing.close()
    until(lambda: not listening.send(peer, b"?"), listening)
    assert not listening.send(peer, b"?")


@pytest.mark.parametrize("sender", ["pool", "target"])
def test_a_full_queue_loses_frames_and_never_blocks(both: Both, sender: str) -> None:
    listening, dialing = both
    peer = introduce(dialing, listening).peer
    source, sink, to = (listening, dialing, peer) if sender == "pool" else (dialing, listening, b"0")
    frame, sent = bytes(1 << 16), 0
    while source.send(to, frame):
        sent += 1
        assert sent < 100 * HIGH_WATER
    assert sent >= HIGH_WATER // 2  # ZeroMQ counts what has left the queue in batches
    exactly(sent, sink)
    until(lambda: source.send(to, b"again"), source)
    assert exactly(1, sink)[0].frame == b"again"


def test_oversized_frames_are_not_sent(both: Both) -> None:
    listening, dialing = both
    peer = introduce(dialing, listening).peer
    assert not dialing.send(b"0", bytes(MAX_FRAME + 1)) and not listening.send(peer, bytes(MAX_FRAME + 1))
    assert dialing.send(b"0", bytes(MAX_FRAME)) and len(exactly(1, listening)[0].frame) == MAX_FRAME


def test_an_oversized_frame_ends_its_sender_s_connection_alone(listen: Listen, dial: Dial, raw: Any) -> None:
    listening = listen(ANY_PORT)
    dialing, hostile = dial(listening.endpoint), raw(zmq.DEALER, reconnect_ivl=-1)
    peer = introduce(dialing, listening).peer
    hostile.monitor("inproc://events", zmq.Event.DISCONNECTED)
    events = raw(zmq.PAIR)
    events.connect("inproc://events")
    hostile.connect(listening.endpoint)
    hostile.send_multipart([b"hostile", bytes(MAX_FRAME + 100)])
    assert events.poll(LONG * 1000) and silent(listening)
    assert listening.send(peer, b"still here") and exactly(1, dialing)[0].frame == b"still here"


def test_a_pool_that_sends_an_oversized_frame_is_dialled_again(dial: Dial, raw: Any) -> None:
    pool = raw(zmq.ROUTER)
    pool.bind(ANY_PORT)
    dialing = dial(pool.last_endpoint.decode())

    def route() -> bytes:
        connect(dialing)
        until(lambda: dialing.send(b"0", b"?"), dialing)
        return bytes(pool.recv_multipart()[0])

    first = route()
    pool.send_multipart([first, bytes(MAX_FRAME + 100)])
    until(lambda: dialing.problem(b"0") is not None, dialing)
    assert "hung up" in (dialing.problem(b"0") or "")
    second = route()
    pool.send_multipart([second, b"well"])
    assert second != first and exactly(1, dialing)[0].frame == b"well"


def test_what_is_no_message_is_dropped(listen: Listen, raw: Any) -> None:
    listening = listen(ANY_PORT)
    client = raw(zmq.DEALER)
    client.connect(listening.endpoint)
    for parts in ([b"one part"], [b"", b"unnamed"], [bytes(65), b"long name"]):
        client.send_multipart(parts)
    client.send_multipart([b"run", b"good"])
    assert exactly(1, listening)[0].frame == b"good"


def test_a_message_of_too_many_frames_is_dropped(listen: Listen, dial: Dial, raw: Any) -> None:
    many = [b""] * (MAX_FRAMES + 1)
    listening, client, pool = listen(ANY_PORT), raw(zmq.DEALER), raw(zmq.ROUTER)
    client.connect(listening.endpoint)
    client.send_multipart([b"run", *many])
    client.send_multipart([b"run", b"good"])
    (received,) = exactly(1, listening)
    assert received.frame == b"good" and not listening.send(received.peer, *many)
    pool.bind(ANY_PORT)
    dialing = dial(pool.last_endpoint.decode())
    connect(dialing)
    until(lambda: dialing.send(b"0", b"?"), dialing)
    route = pool.recv_multipart()[0]
    pool.send_multipart([route, *many])
    pool.send_multipart([route, b"good"])
    assert exactly(1, dialing)[0].frame == b"good" and not dialing.send(b"0", *many)


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\xff" * 1000, b"\xff\0\0\0\0\0\0\0\1\x7f\3"])
def test_other_protocols_do_no_harm(listen: Listen, dial: Dial, junk: bytes) -> None:
    listening = listen(ANY_PORT)
    with socket.create_connection(("127.0.0.1", int(listening.endpoint.rpartition(":")[2]))) as stranger:
        stranger.sendall(junk)
        assert silent(listening)
        assert introduce(dial(listening.endpoint), listening).frame == b"hello"


@pytest.mark.parametrize("end", [0, 1])
def test_wake_from_another_thread(both: Both, end: int) -> None:
    channel: Channel = both[end]
    result: list[object] = []
    waiting = threading.Thread(target=lambda: result.append(channel.receive(10 * LONG)))
    waiting.start()
    channel.wake()
    waiting.join(LONG)
    assert not waiting.is_alive() and result == [[]]


def test_a_wake_before_waiting_counts_once(listen: Listen, dial: Dial) -> None:
    listening = listen(ANY_PORT)
    listening.wake()
    listening.wake()
    assert listening.receive(10 * LONG) == []  # at once, or this test takes minutes
    assert introduce(dial(listening.endpoint), listening).frame == b"hello"


def test_closing_twice_and_waking_what_is_closed(both: Both) -> None:
    for channel in both:
        channel.close()
        channel.close()
        channel.wake()


def test_a_pool_that_restarts_is_found_again(both: Both, listen: Listen, pool_keys: PoolKeys) -> None:
    listening, dialing = both
    peer = introduce(dialing, listening).peer
    listening.close()
    until(lambda: dialing.problem(b"0") is not None, dialing)
    assert not dialing.send(b"0", b"lost")
    restarted = listen(listening.endpoint, pool_keys if listening._key_length else None)
    back = introduce(dialing, restarted, b"back")
    assert back.frame == b"back" and back.peer == peer and restarted.send(peer, b"welcome")
    assert exactly(1, dialing)[0].frame == b"welcome"


def test_pools_come_and_go(listen: Listen, dial: Dial, tmp_path: Path) -> None:
    """A peer's number is never another's, and nothing of what was hung up remains."""
    dialing, listening = dial([]), listen(f"ipc://{tmp_path}/pool")
    for i in range(20):
        peer = dialing.dial(dialing.checked(listening.endpoint, None), None)
        assert peer == str(i).encode()
        connect(dialing, listening, pool=peer)
        assert dialing.send(peer, b"hello") and exactly(1, listening, dialing)[0].frame == b"hello"
        dialing.hang_up(peer)
        assert not dialing.send(peer, b"gone") and "not dialled any more" in (dialing.problem(peer) or "")
        assert not dialing.refused(peer)
    assert not dialing._handlers and silent(dialing, listening)


def test_what_was_sent_before_hanging_up_arrives_and_others_stay(both: Both, listen: Listen) -> None:
    listening, dialing = both
    other = listen(ANY_PORT)
    peer = dialing.dial(dialing.checked(other.endpoint, None), None)
    connect(dialing, other, pool=peer)
    introduce(dialing, listening)
    assert dialing.send(b"0", b"farewell")
    dialing.hang_up(b"0")
    assert exactly(1, listening)[0].frame == b"farewell"
    assert dialing.send(peer, b"still here") and exactly(1, other, dialing)[0].frame == b"still here"


def test_what_is_dialled_later_is_checked_as_well(dial: Dial) -> None:
    dialing = dial([], role="prefill")
    for endpoint, problem in (("tcp://192.0.2.1:7", "prefill_pool.*--prefill-key"), ("http://x", "prefill_pool")):
        with pytest.raises(ParameterError, match=problem):
            dialing.checked(endpoint, None)


def test_a_target_that_comes_back_is_the_same_peer(listen: Listen, dial: Dial) -> None:
    listening = listen(ANY_PORT)
    before, after = dial(listening.endpoint, b"run"), dial(listening.endpoint, b"run")
    peer = introduce(before, listening).peer
    assert introduce(after, listening).peer == peer and listening.send(peer, b"for the newer")
    assert exactly(1, after)[0].frame == b"for the newer" and silent(before)


def test_connections_that_name_themselves_are_not_heard(listen: Listen, raw: Any) -> None:
    listening = listen(ANY_PORT)
    client = raw(zmq.DEALER, routing_id=b"mine!")
    client.connect(listening.endpoint)
    client.send_multipart([b"run", b"unheard"])
    assert silent(listening)


def test_of_too_many_peers_the_longest_silent_is_forgotten(
    listen: Listen, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets_module, "MAX_PEERS", 2)
    listening = listen(ANY_PORT)
    client = raw(zmq.DEALER)
    client.connect(listening.endpoint)
    for name in (b"1", b"2", b"1", b"3"):
        client.send_multipart([name, b""])
    exactly(4, listening)
    assert [listening.send(peer, peer) for peer in (b"1", b"2", b"3")] == [True, False, True]


def test_a_socket_s_file_is_the_owner_s_alone_and_goes(listen: Listen, tmp_path: Path) -> None:
    path = tmp_path / "pool"
    listening = listen(f"ipc://{path}")
    assert stat.S_ISSOCK(path.stat().st_mode) and stat.S_IMODE(path.stat().st_mode) & 0o177 == 0
    listening.close()
    assert not path.exists()


def test_a_signal_as_it_is_made_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bind = zmq.Socket.bind

    def interrupted(socket: zmq.Socket[bytes], address: str) -> None:
        bind(socket, address)
        assert (tmp_path / "pool").exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(zmq.Socket, "bind", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ListeningChannel(f"ipc://{tmp_path}/pool")
    assert not (tmp_path / "pool").exists()


def test_a_dead_pool_s_file_is_replaced(listen: Listen, dial: Dial, tmp_path: Path) -> None:
    path = tmp_path / "pool"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    listening = listen(f"ipc://{path}")
    assert introduce(dial(listening.endpoint), listening).frame == b"hello"


@pytest.mark.parametrize(
    ("host", "endpoint", "insecure"),
    [("localhost", "tcp://localhost:*", False), ("127.0.0.1", "tcp://*:*", True), ("[::1]", "tcp://[::1]:0", False)],
)
def test_ways_to_name_a_host(host: str, endpoint: str, insecure: bool, listen: Listen, dial: Dial) -> None:
    if host == "[::1]":
        with socket.socket(socket.AF_INET6) as probe:
            try:
                probe.bind(("::1", 0))
            except OSError:
                pytest.skip("no IPv6 here")
    listening = listen(endpoint, insecure=insecure)
    port = listening.endpoint.rpartition(":")[2]
    assert introduce(dial(f"tcp://{host}:{port}"), listening).frame == b"hello"


def test_a_broken_handshake_is_tried_again_later(dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets_module, "REDIAL_REFUSED", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        dialing = dial(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        attempts = 0

        def twice() -> bool:
            nonlocal attempts
            try:
                server.accept()[0].close()
            except BlockingIOError:
                return False
            attempts += 1
            return attempts == 3

        until(twice, dialing)
        until(lambda: "has not answered" not in (dialing.problem(b"0") or ""), dialing)
        assert "broke off" in (dialing.problem(b"0") or "") or "hung up" in (dialing.problem(b"0") or "")


def test_a_fleet_of_hundreds_is_dialled_and_heard(dial: Dial, listen: Listen, tmp_path: Path) -> None:
    """ZeroMQ by itself allows 1,023 sockets, of which a connection takes three."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 4096:
        pytest.skip("fewer files than that may be open here")
    there = {place: listen(f"ipc://{tmp_path}/{place}") for place in (0, 399)}
    dialing = dial([f"ipc://{tmp_path}/{place}" for place in range(400)])
    for place, listening in there.items():
        target = str(place).encode()
        until(lambda target=target: dialing.send(target, b"hello"), dialing)
        assert listening.send(exactly(1, listening)[0].peer, b"hello back")
        assert exactly(1, dialing)[0].peer == target
