"""With keys: who comes in, what is known of them, and what those are told who do not."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import zmq
from ends import connect, exactly, introduce, silent, until

from pilotfish.wire import sockets
from pilotfish.wire.curve_keys import KeyPair, PoolClient, PoolKeys, TargetKeys
from pilotfish.wire.sockets import DialingChannel, ListeningChannel

Listen = Callable[..., ListeningChannel]
Dial = Callable[..., DialingChannel]
Identities = dict[str, KeyPair]
Target = Callable[..., DialingChannel]
ANY_PORT = "tcp://127.0.0.1:0"


@pytest.fixture
def pool(listen: Listen, pool_keys: PoolKeys) -> ListeningChannel:
    return listen(ANY_PORT, pool_keys)


@pytest.fixture
def target(dial: Dial, target_keys: dict[str, TargetKeys]) -> Target:
    """One that dials a pool with somebody's key."""
    return lambda pool, name, run=b"run": dial(pool.endpoint, run, [target_keys[name]])


def refused(dialing: DialingChannel, pool: ListeningChannel) -> str:
    """The problem of a target that never gets a frame through."""

    def known() -> bool:
        assert not dialing.send(b"0", b"never")
        return "has not answered yet" not in (dialing.problem(b"0") or "")

    assert until(known, dialing, pool) == [] and silent(pool, dialing)
    problem = dialing.problem(b"0")
    assert problem is not None and "\n" not in problem and problem.startswith(f"draft_pool: {pool.endpoint} ")
    return problem


def test_tenant_and_weight_follow_from_the_key(pool: ListeningChannel, target: Target, identities: Identities) -> None:
    for name, tenant, weight in (("a", "search", 3.0), ("b", "chat", 1.0)):
        hello = introduce(target(pool, name), pool)
        assert (hello.tenant, hello.weight) == (tenant, weight)
        assert hello.peer == identities[name].public.encode() + b"run"


def test_an_unknown_key(pool: ListeningChannel, target: Target, identities: Identities) -> None:
    problem = refused(target(pool, "stranger"), pool)
    assert f"refused the key {identities['stranger'].public}" in problem
    assert identities["stranger"].secret not in problem


def test_a_wrong_key_of_the_pool(pool: ListeningChannel, dial: Dial, identities: Identities) -> None:
    keys = TargetKeys(identities["a"], identities["b"].public)
    assert f"its public key is not {identities['b'].public}" in refused(dial(pool.endpoint, b"run", [keys]), pool)


def test_no_key(pool: ListeningChannel, dial: Dial) -> None:
    assert "wants a key" in refused(dial(pool.endpoint), pool)


def test_a_key_for_a_pool_without(listen: Listen, target: Target) -> None:
    pool = listen(ANY_PORT)
    assert "or it has none" in refused(target(pool, "a"), pool)


def test_a_password_is_no_key(pool: ListeningChannel, raw: Any) -> None:
    client = raw(zmq.DEALER, plain_username=b"search", plain_password=b"secret")
    client.sndtimeo = 1000  # ms; once it was turned away there is nobody to send to
    client.connect(pool.endpoint)
    with contextlib.suppress(zmq.Again):
        client.send_multipart([b"run", b"unheard"])
    assert silent(pool)


def test_the_refused_disturb_nobody(pool: ListeningChannel, target: Target) -> None:
    welcome = target(pool, "a")
    peer = introduce(welcome, pool).peer
    refused(target(pool, "stranger"), pool)
    assert welcome.problem(b"0") is None and pool.send(peer, b"yours")
    assert exactly(1, welcome)[0].frame == b"yours"


def test_a_key_that_is_allowed_later(
    listen: Listen, target: Target, identities: Identities, pool_keys: PoolKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "REDIAL_REFUSED", 0.05)
    strict = listen(ANY_PORT, pool_keys)
    dialing = target(strict, "stranger")
    refused(dialing, strict)
    strict.close()
    late = {identities["stranger"].public: PoolClient("late", 0.5)}
    tolerant = listen(strict.endpoint, PoolKeys(pool_keys.own, late))
    assert introduce(dialing, tolerant).tenant == "late"


def test_an_incarnation_is_nobody_else_s(pool: ListeningChannel, target: Target) -> None:
    """Neither by saying the same name, before or after the other, nor by spelling out its address."""
    victim = target(pool, "a")
    peer = introduce(victim, pool).peer
    thieves = [target(pool, "b", name) for name in (b"run", peer)]
    assert {introduce(thief, pool).peer for thief in thieves}.isdisjoint({peer})
    assert pool.send(peer, b"secret")
    assert exactly(1, victim)[0].frame == b"secret" and silent(*thieves)
    victim.close()
    until(lambda: not pool.send(peer, b"secret"), pool)
    assert silent(*thieves)


def test_a_connection_s_name_cannot_be_chosen(
    pool: ListeningChannel, target: Target, raw: Any, identities: Identities
) -> None:
    """Not even that of a connection that lives, which no client is told: the first one keeps it."""
    victim = target(pool, "a")
    peer = introduce(victim, pool).peer
    own, server = identities["b"], identities["pool"].public
    keys = {"curve_publickey": own.public, "curve_secretkey": own.secret, "curve_serverkey": server}
    thief = raw(zmq.DEALER, **{name: key.encode() for name, key in keys.items()})
    thief.routing_id = pool._routes[peer[:40]][peer]
    thief.connect(pool.endpoint)
    thief.send_multipart([b"run", b"unheard"])
    assert silent(pool) and pool.send(peer, b"secret") and exactly(1, victim)[0].frame == b"secret"
    assert not thief.poll(100)


def test_keys_on_ipc_too(listen: Listen, dial: Dial, target: Target, pool_keys: PoolKeys, tmp_path: Any) -> None:
    pool = listen(f"ipc://{tmp_path}/pool", pool_keys)
    assert introduce(target(pool, "a"), pool).tenant == "search"
    assert "wants a key" in refused(dial(pool.endpoint), pool)


def test_some_pools_with_keys_some_without(
    pool: ListeningChannel, listen: Listen, dial: Dial, target_keys: dict[str, TargetKeys]
) -> None:
    plain = listen(ANY_PORT)
    dialing = dial([pool.endpoint, plain.endpoint], b"run", [target_keys["a"], None])
    connect(dialing, pool, pool=b"0")
    connect(dialing, plain, pool=b"1")
    until(lambda: dialing.send(b"1", b"hello"), dialing)
    assert exactly(1, plain)[0].tenant == ""


def test_other_hosts_with_keys(listen: Listen, pool_keys: PoolKeys) -> None:
    assert listen("tcp://0.0.0.0:0", pool_keys).endpoint.startswith("tcp://0.0.0.0:")
