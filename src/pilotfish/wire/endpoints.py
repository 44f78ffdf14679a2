"""Addresses of pools: `ipc://PATH` on one host, `tcp://HOST:PORT` between hosts."""

import errno
import ipaddress
import os
import re
import socket
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pilotfish.errors import ParameterError

#: Bytes of a path that fit into a Unix socket's address, less the final zero.
MAX_PATH = 107
_TCP = re.compile(r"(?P<host>\*|\[(?P<v6>[0-9A-Fa-f:.]+(%\w+)?)\]|[\w.-]+):(?P<port>\*|\d{1,5})", re.ASCII)
ALLOWED = "ipc://PATH or tcp://HOST:PORT"


@dataclass(frozen=True)
class Endpoint:
    """A checked address. Hosts are resolved, so the address that is bound is the one that was checked."""

    url: str  # as ZeroMQ takes it
    path: Path | None = None  # of an ipc socket
    private: bool = True  # frames cannot leave this host
    ipv6: bool = False


def listening_endpoint(field: str, text: str) -> Endpoint:
    """Host `*`: all interfaces; port 0 or `*`: a free port. ParameterError also for an ipc path that cannot be ours."""
    if text.startswith("ipc://"):
        return Endpoint(text, _free_path(field, text))
    host, port = _tcp(field, text)
    if host == "*":
        return Endpoint(f"tcp://0.0.0.0:{port}", private=False)
    family, addresses = _resolved(field, text, host)
    ipv6 = family == socket.AF_INET6
    url = f"tcp://[{addresses[0]}]:{port}" if ipv6 else f"tcp://{addresses[0]}:{port}"
    return Endpoint(url, private=_loopback(addresses), ipv6=ipv6)


def dialled_endpoint(field: str, text: str) -> Endpoint:
    """A host's name is kept, so that a pool that moves is found again."""
    if text.startswith("ipc://"):
        return Endpoint(text, _path(field, text))
    family, addresses = _resolved(field, text, _dialled_host(field, text))
    return Endpoint(text, private=_loopback(addresses), ipv6=family == socket.AF_INET6)


def check_spelling(field: str, text: str) -> None:
    """ParameterError for an address that cannot be dialled. Looks up no host name."""
    if text.startswith("ipc://"):
        _path(field, text)
    else:
        _dialled_host(field, text)


def _dialled_host(field: str, text: str) -> str:
    host, port = _tcp(field, text)
    if host == "*" or port in ("*", "0"):
        raise ParameterError(field, text, "a host and a port, not a wildcard")
    return host


def _tcp(field: str, text: str) -> tuple[str, str]:
    match = _TCP.fullmatch(text.removeprefix("tcp://")) if text.startswith("tcp://") else None
    if match is None:
        raise ParameterError(field, text, ALLOWED)
    port = "*" if match["port"] == "*" else str(int(match["port"]))
    if port != "*" and int(port) > 65535:
        raise ParameterError(field, text, "a port up to 65535")
    return match["v6"] or match["host"], port


def is_loopback(field: str, host: str) -> bool:
    """ParameterError for a host without an address."""
    return _loopback([address for _, address in _addresses(field, host, host)])


def _resolved(field: str, text: str, host: str) -> tuple[socket.AddressFamily, list[str]]:
    """Addresses of one family: IPv4 if the host has any."""
    found = _addresses(field, text, host)
    family = min(family for family, _ in found)  # AF_INET is less than AF_INET6
    return family, [address for of, address in found if of == family]


def _addresses(field: str, text: str, host: str) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ParameterError(field, text, f"a host that can be resolved, which {host} cannot") from error
    return [(info[0], str(info[4][0])) for info in found]


def _loopback(addresses: list[str]) -> bool:
    return all(ipaddress.ip_address(address).is_loopback for address in addresses)


def _path(field: str, text: str) -> Path:
    path = text.removeprefix("ipc://")
    if not path or path[0] in "@*" or "\0" in path:  # ZeroMQ takes @ for a name that no mode guards, * for any path
        raise ParameterError(field, text, "ipc:// and a path")
    if len(os.fsencode(path)) > MAX_PATH:
        raise ParameterError(field, text, f"a path of at most {MAX_PATH} bytes")
    return Path(path)


def _free_path(field: str, text: str) -> Path:
    """Refuse a path in use: ZeroMQ would take it from its owner."""

    def refuse(allowed: str) -> NoReturn:
        raise ParameterError(field, text, allowed)

    path = _path(field, text)
    try:
        directory = path.parent.stat()
    except OSError:
        refuse("a path in a directory that exists")
    if directory.st_uid != os.geteuid() or directory.st_mode & stat.S_IWOTH:
        refuse("a path in a directory of your own that others cannot write to")
    if path.is_symlink() or path.exists():
        if not stat.S_ISSOCK(path.lstat().st_mode):
            refuse("a path where no other file is")
        if not _abandoned(path):
            refuse("a path where nobody listens yet")
    return path


def _abandoned(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED


def check_private(field: str, text: str, endpoint: Endpoint, allowed: bool) -> None:
    """ParameterError where frames would leave this host in the clear, unless that is `allowed`."""
    if not (endpoint.private or allowed):
        role = field.removesuffix("_pool")
        options = "--key and --allow" if field == "listen" else f"--{role}-key and --{role}-pool-key"
        raise ParameterError(field, text, f"an address of this host alone, keys ({options}), or --insecure")
