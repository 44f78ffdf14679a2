"""Checks before anything of a cluster starts. Each problem is one line that says which and where."""

import hashlib
import ipaddress
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from pilotfish.cluster.config import ClusterConfig, Role
from pilotfish.errors import InputError, ParameterError
from pilotfish.server.auth import ENVIRONMENT, Keyring, load_keyring, refuse_open
from pilotfish.wire.curve_keys import load_key_pair

Resources = Mapping[str, float]
#: Bytes of a weight file at either end.
END = 1 << 20
#: Files of a model that all of its roles read.
SHARED = ("config.json", "tokenizer.json")
WEIGHTS = "weights"
#: Rounding of sums of fractions.
EPSILON = 1e-6


@dataclass(frozen=True)
class Host:
    id: str  # Ray's
    name: str  # for people
    has: Resources
    labels: Mapping[str, str] = field(default_factory=dict)
    address: str = "127.0.0.1"


@dataclass(frozen=True)
class HostReport:
    version: str
    models: Mapping[Role, Mapping[str, str]]  # digests, by file
    key: str = ""  # its public half
    problem: str = ""  # why a role could not run there


def check_private(config: ClusterConfig, hosts: Sequence[Host]) -> None:
    """InputError if prompts would cross a network in the clear and `insecure` is not set."""
    beyond = [host.name for host in hosts if not ipaddress.ip_address(host.address).is_loopback]
    if beyond and config.key is None and not config.insecure:
        raise ParameterError("key", None, f"a key file for hosts on a network ({', '.join(beyond)}), or insecure: true")


def needs(config: ClusterConfig, role: Role) -> dict[str, float]:
    own, ranks = config.of(role), config.engine.tensor_parallel if role == "target" else 1
    amounts = {"CPU": own.cpus, "GPU": own.gpus, **own.devices}
    return {name: ranks * amount for name, amount in amounts.items() if amount}


def fits(config: ClusterConfig, role: Role, host: Host, free: Resources) -> bool:
    needed, labels = needs(config, role), config.of(role).labels
    return _labelled(host, labels) and all(free.get(name, 0.0) + EPSILON >= amount for name, amount in needed.items())


def check_devices(config: ClusterConfig, hosts: Sequence[Host]) -> None:
    """InputError if hosts lack labels or devices: in sum, for one process, or for all together."""
    for role in config.present:
        labels = config.of(role).labels
        if not any(_labelled(host, labels) for host in hosts):
            asked_for = ", ".join(f"{name}={value}" for name, value in labels.items())
            raise InputError(f"roles.{role}.labels: {asked_for} on none of {', '.join(host.name for host in hosts)}")
    wanted = {role: needs(config, role) for role in config.present}
    for name in dict.fromkeys(name for needed in wanted.values() for name in needed):
        asked = sum(config.of(role).count * needed.get(name, 0.0) for role, needed in wanted.items())
        if asked > sum(host.has.get(name, 0.0) for host in hosts) + EPSILON:
            roles = " and ".join(role for role, needed in wanted.items() if name in needed)
            raise InputError(f"roles: {roles} ask for {asked:g} {name}; there {_told(name, hosts)}")
    _check_places(config, wanted, hosts)


def _labelled(host: Host, labels: Mapping[str, str]) -> bool:
    return all(host.labels.get(name) == value for name, value in labels.items())


def _told(name: str, hosts: Sequence[Host]) -> str:
    there = [(host.name, host.has[name]) for host in hosts if host.has.get(name)]
    if not there:
        return f"are none on any of {', '.join(host.name for host in hosts)}"
    return f"are {sum(each for _, each in there):g}: " + ", ".join(f"{each:g} on {host}" for host, each in there)


def _check_places(config: ClusterConfig, wanted: Mapping[Role, Resources], hosts: Sequence[Host]) -> None:
    """Roles with labels go first, then those that need most, each to the first host that has room."""
    free = {host.id: dict(host.has) for host in hosts}
    for role in sorted(wanted, key=lambda role: (not config.of(role).labels, -sum(wanted[role].values()))):
        needed = wanted[role]
        for number in range(config.of(role).count):
            place = next((host for host in hosts if fits(config, role, host, free[host.id])), None)
            if place is None:
                amounts = ", ".join(f"{amount:g} {name}" for name, amount in needed.items())
                labels = "".join(f", {name}={value}" for name, value in config.of(role).labels.items())
                raise InputError(f"roles.{role}: no host has {amounts}{labels} for number {number + 1} of it")
            for name, amount in needed.items():
                free[place.id][name] -= amount


def possible_roles(config: ClusterConfig, host: Host) -> list[Role]:
    return [role for role in config.present if fits(config, role, host, host.has)]


def host_report(config: ClusterConfig, roles: Iterable[Role]) -> HostReport:
    models: dict[Role, dict[str, str]] = {}
    key = problem = ""
    try:
        key = "" if config.key is None else load_key_pair("key", config.key).public
        for role in roles:
            models[role] = model_digests(role, config.model_of(role))
            if role == "api":
                clients(config)
    except InputError as error:
        problem = str(error)
    return HostReport(version("pilotfish"), models, key, problem)


def clients(config: ClusterConfig) -> Keyring:
    """InputError if nobody may come, or anybody by mistake."""
    keys = load_keyring((), os.environ.get(ENVIRONMENT, ""), config.api_keys)
    refuse_open(config.server.host, keys, config.allow_anonymous)
    return keys


def model_digests(role: Role, directory: Path) -> dict[str, str]:
    """By file; of weights, which servers need not have, names, sizes and both ends. InputError without a model."""
    try:
        digests = {name: hashlib.sha256((directory / name).read_bytes()).hexdigest() for name in SHARED}
        ends = [_ends(path) for path in sorted(directory.glob("*.safetensors"))]
    except OSError as error:
        raise InputError(f"roles.{role}.model: {error.filename} cannot be read ({error.strerror})") from error
    if not ends and role != "api":
        raise InputError(f"roles.{role}.model: {directory} has no weights in safetensors")
    return digests if role == "api" else {**digests, WEIGHTS: " ".join(ends)}


def _ends(path: Path) -> str:
    with path.open("rb") as file:
        first = file.read(END)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - END))
        return hashlib.sha256(f"{path.name} {size}".encode() + first + file.read()).hexdigest()


def check_reports(reports: Mapping[str, HostReport], own_version: str) -> None:
    """InputError for the first thing that is missing somewhere, or not the same everywhere."""
    for name, report in reports.items():
        if report.version != own_version:
            raise InputError(f"version: {name} has Pilotfish {report.version}; expected {own_version}, as here")
        if report.problem:
            raise InputError(f"{name}: {report.problem}")
    keys = {report.key: name for name, report in reports.items()}
    if len(keys) > 1:
        first, second = list(keys.values())[:2]
        raise InputError(f"key: {first} and {second} have different ones; expected the same on every host")
    for roles in (("target", "prefill", "api"), ("draft",)):
        _check_models(reports, roles)


def _check_models(reports: Mapping[str, HostReport], roles: Sequence[str]) -> None:
    first: dict[str, tuple[str, str]] = {}  # by file: whose, and its digest
    for role in roles:
        for name, report in reports.items():
            for file, digest in report.models.get(role, {}).items():  # type: ignore[call-overload]
                whose, expected = first.setdefault(file, (f"roles.{role} on {name}", digest))
                if digest != expected:
                    raise InputError(f"model: {file} of roles.{role} on {name} is not that of {whose}")
