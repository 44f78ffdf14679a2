"""Addresses that cannot be used are refused in one line that names the field and the value."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from refusals import refused

from pilotfish.errors import ParameterError
from pilotfish.wire.endpoints import dialled_endpoint, listening_endpoint

Open = Callable[..., Any]

NO_ADDRESS = [
    *("", "/tmp/pool", "127.0.0.1:5555", "http://127.0.0.1:5555", "inproc://pool", "tcp://"),
    *("tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://:5555", "tcp://127.0.0.1:http", "tcp://127.0.0.1:65536"),
    *("tcp://127.0.0.1:5555/path", "tcp://127.0.0.1:5555;tcp://127.0.0.1:5556", "tcp://[::1:5555"),
    *("tcp://127.0.0.1:5555\n", "ipc://", "ipc://@abstract", "ipc://*", "ipc:///tmp/\0"),
    *(f"ipc:///{'x' * 107}", "tcp://no-such-host.invalid:5555", f"tcp://{'x' * 64}.invalid:5555"),
]


def refusal(open_channel: Open, field: str, *given: Any, **options: Any) -> str:
    """The line with which a channel is refused."""
    line = refused(ParameterError, open_channel, *given, **options)
    assert line.startswith(f"{field}: {given[0]!r} is not allowed; expected ")
    return line


@pytest.mark.parametrize("text", NO_ADDRESS)
def test_no_address(text: str, listen: Open, dial: Open) -> None:
    refusal(listen, "listen", text)
    refusal(dial, "draft_pool", text)


@pytest.mark.parametrize("text", ["tcp://*:5555", "tcp://127.0.0.1:0", "tcp://127.0.0.1:00", "tcp://127.0.0.1:*"])
def test_nobody_dials_a_wildcard(text: str, dial: Open) -> None:
    assert "not a wildcard" in refusal(dial, "draft_pool", text)


@pytest.mark.parametrize("text", ["tcp://*:*", "tcp://0.0.0.0:0", "tcp://[::]:0"])
def test_listening_beyond_this_host_needs_keys(text: str, listen: Open) -> None:
    line = refusal(listen, "listen", text)
    assert "--key and --allow" in line and "--insecure" in line


def test_dialling_beyond_this_host_needs_keys(dial: Open) -> None:
    line = refusal(dial, "draft_pool", "tcp://192.0.2.1:5555")
    assert "--draft-key and --draft-pool-key" in line and "--insecure" in line


def test_a_port_in_use(listen: Open) -> None:
    taken = listen("tcp://127.0.0.1:0").endpoint
    assert "Address already in use" in refusal(listen, "listen", taken)


def test_an_address_of_another_host(listen: Open) -> None:
    refusal(listen, "listen", "tcp://192.0.2.1:5555", insecure=True)


def test_a_path_in_use_stays_in_use(listen: Open, tmp_path: Path) -> None:
    first = listen(f"ipc://{tmp_path}/pool")
    assert "nobody listens yet" in refusal(listen, "listen", first.endpoint)
    assert (tmp_path / "pool").is_socket()


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir, lambda path: path.symlink_to("nowhere")])
def test_other_files_are_left_alone(make: Callable[[Path], None], listen: Open, tmp_path: Path) -> None:
    path = tmp_path / "pool"
    make(path)
    assert "no other file" in refusal(listen, "listen", f"ipc://{path}")
    assert path.is_symlink() or path.exists()


def test_directories_of_others(listen: Open, tmp_path: Path) -> None:
    assert "a directory that exists" in refusal(listen, "listen", f"ipc://{tmp_path}/none/pool")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)
    assert "of your own" in refusal(listen, "listen", f"ipc://{tmp_path}/open/pool")


def test_a_directory_that_another_user_owns(listen: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    assert "of your own" in refusal(listen, "listen", f"ipc://{tmp_path}/pool")


def test_the_longest_path(listen: Open, tmp_path: Path) -> None:
    room = 107 - len(f"{tmp_path}/")
    assert room > 0
    with_room = listen(f"ipc://{tmp_path}/{'x' * room}")
    assert with_room.endpoint.endswith("x" * room)
    assert "at most 107 bytes" in refusal(listen, "listen", f"ipc://{tmp_path}/{'x' * (room + 1)}")


@pytest.mark.parametrize("incarnation", [b"", bytes(65)])
def test_an_incarnation_has_a_length(incarnation: bytes, dial: Open) -> None:
    with pytest.raises(ParameterError, match=r"incarnation: .* expected 1 to 64 bytes"):
        dial("tcp://127.0.0.1:5555", incarnation)


@pytest.mark.parametrize(
    ("text", "url", "private"),
    [
        ("tcp://127.0.0.2:1", "tcp://127.0.0.2:1", True),
        ("tcp://*:7", "tcp://0.0.0.0:7", False),
        ("tcp://192.0.2.1:65535", "tcp://192.0.2.1:65535", False),
        ("tcp://[::1]:*", "tcp://[::1]:*", True),
        ("tcp://[2001:db8::1]:7", "tcp://[2001:db8::1]:7", False),
    ],
)
def test_what_stays_on_this_host(text: str, url: str, private: bool) -> None:
    endpoint = listening_endpoint("listen", text)
    assert (endpoint.url, endpoint.private, endpoint.ipv6) == (url, private, "[" in text)


def test_a_name_is_private_only_if_all_its_addresses_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object, **__: object) -> list[Any]:
        return [(socket.AF_INET, None, None, "", (address, 0)) for address in ("127.0.0.1", "192.0.2.1")]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    endpoint = dialled_endpoint("draft_pool", "tcp://pool.example:5555")
    assert not endpoint.private and endpoint.url == "tcp://pool.example:5555"
