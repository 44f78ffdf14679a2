"""A full queue, keys and their limits: who is turned away, and that nobody else is harmed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from http_clients import LIMIT, Client, ask, balanced, completion
from live import LiveServer
from workers import eventually

KEYS = {name: f"the-secret-of-{name}-is-long" for name in ("plain", "salted", "narrow", "slow")}
LIMITS = {"salted": 'cache_salt = "its own"', "narrow": "max_concurrency = 1", "slow": "requests_per_minute = 1"}
LONG = [completion(i, max_tokens=120) for i in range(5)]


def of(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Two sequences at a time, and three that wait."""
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    entries = (f'[[key]]\nname = "{name}"\nsecret = "{KEYS[name]}"\n{LIMITS.get(name, "")}\n' for name in KEYS)
    file.touch(mode=0o600)
    file.write_text("".join(entries))
    options = {"max_requests": 2, "max_queued_requests": 3, "api_keys": file, "pace": "target=4ms"}
    with LiveServer(llama, mode="off", **options) as server:
        yield server


@pytest.fixture(scope="module")
def expected(server: LiveServer) -> list[str]:
    return [ask(server, body, **of("plain")).text for body in LONG]


def test_a_full_queue_turns_away_what_is_more(server: LiveServer, expected: list[str]) -> None:
    clients = [Client(server, {**body, "stream": i % 2 == 0}, of("plain")) for i, body in enumerate(LONG)]
    eventually(lambda: server.metric("pilotfish_requests_in_flight") == 5)
    for stream in (True, False, True):
        surplus = ask(server, completion(stream=stream), **of("plain"))
        assert (surplus.status, surplus.error["code"]) == (429, "queue_full")
        assert surplus.error["type"] == "rate_limit_error" and "max_queued_requests" in surplus.error["message"]
        assert 1 <= int(surplus.headers["retry-after"]) <= 60
    assert all(client.answer.whole for client in clients)
    assert [client.answer.text for client in clients] == expected
    eventually(lambda: balanced(server))


HEADERS = ["", "Bearer ", "Bearer the-secret-of-nobody-is-long", "Basic eDp5", "Bearer \xff" * 9]


@pytest.mark.parametrize("header", HEADERS)
def test_who_has_no_key_is_not_let_in(server: LiveServer, header: str) -> None:
    answer = ask(server, completion(), authorization=header)
    assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
    assert answer.headers["www-authenticate"] == "Bearer"


def test_one_key_s_limits_are_its_own(server: LiveServer, expected: list[str]) -> None:
    running = Client(server, {**LONG[0], "stream": True}, of("narrow"))
    assert running.begun.wait(LIMIT)
    second = ask(server, completion(), **of("narrow"))
    assert (second.status, second.error["code"]) == (429, "concurrency_exceeded")
    first, second = (ask(server, completion(max_tokens=8), **of("slow")) for _ in range(2))
    assert (first.status, second.status, second.error["code"]) == (200, 429, "rate_limit_exceeded")
    assert 1 <= int(second.headers["retry-after"]) <= 60
    assert ask(server, LONG[1], **of("plain")).text == expected[1]
    assert running.answer.text == expected[0]
    assert ask(server, completion(max_tokens=8), **of("narrow")).status == 200


def test_a_key_s_salt_is_not_the_client_s_to_choose(server: LiveServer, expected: list[str]) -> None:
    refused = ask(server, completion(cache_salt="another"), **of("salted"))
    assert (refused.status, refused.error["param"]) == (400, "cache_salt")
    assert ask(server, LONG[0], **of("salted")).text == expected[0]
    assert ask(server, {**LONG[0], "cache_salt": "mine"}, **of("plain")).text == expected[0]


def test_no_secret_is_in_the_log(server: LiveServer) -> None:
    assert server.log and not any(secret in server.log for secret in KEYS.values())
