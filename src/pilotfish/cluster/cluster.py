import logging
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pilotfish.cluster import preflight
from pilotfish.cluster.alpha import deployment_details, run_applications
from pilotfish.cluster.app import application
from pilotfish.cluster.config import DEPLOYMENTS, ROLES, ClusterConfig, Role
from pilotfish.cluster.heard import Listed
from pilotfish.cluster.listing import Listing
from pilotfish.cluster.preflight import Host, HostReport
from pilotfish.errors import EngineError, InputError, ParameterError

#: Seconds that a host has to look at itself, between two looks at what starts, for Ray to tell what there is, and to be
#: heard at all.
REPORT, LOOK, TELLING, HEARD = 120.0, 0.5, 10.0, 5.0
#: As Ray Serve names them.
PROXIES = {"every_host": "EveryNode", "head": "HeadOnly"}
Say = Callable[[str], None]


@contextmanager
def connected(address: str) -> Iterator[None]:
    _check_heard(address)
    for name in ("ray", "ray.serve"):  # what goes wrong is told in one line
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        ray.init(address, log_to_driver=False, configure_logging=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ParameterError("address", address, "a Ray cluster that runs, as `ray start --head` begins one") from error
    try:
        yield
    finally:
        # the thread of Ray's routers lives on: told of a replica now, it fails, and its loop would log that
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
        ray.shutdown()


def _check_heard(address: str) -> None:
    """Without a listener Ray itself would try for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal():  # "auto", or an address of another form, which Ray knows
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), HEARD).close()
    except (OSError, OverflowError) as error:
        allowed = f"a Ray cluster that runs, as `ray start --head` begins one ({error})"
        raise ParameterError("address", address, allowed) from error


def up(config: ClusterConfig, say: Say) -> str:
    """Starts what is not there, and returns the URL once all serves; "" without a server. InputError, with nothing
    started, if something is missing; EngineError, with what was started taken down, if it does not serve."""
    hosts = cluster_hosts()
    preflight.check_private(config, hosts)
    preflight.check_devices(config, hosts)
    preflight.check_reports(host_reports(config, hosts), version("pilotfish"))
    before = _setups(config)
    changed = [role for role in config.present if before.get(role) != config.setup_of(role)]
    for role in changed:
        say(f"{role}: {config.of(role).count} to start")
    try:
        http = {"host": config.server.host, "port": config.server.port, "request_timeout_s": None}
        serve.start(proxy_location=PROXIES[config.proxies], http_options=http)
        run_applications({config.application(role): application(role, config) for role in changed})
        _wait(config, say)
    except BaseException:
        _take_down([config.application(role) for role in changed if role not in before])
        raise
    _take_down([config.application(role) for role in before if role not in config.present])
    host = f"[{config.server.host}]" if ":" in config.server.host else config.server.host
    return f"http://{host}:{config.server.port}" if "api" in config.present else ""


def cluster_hosts() -> list[Host]:
    alive = [node for node in ray.nodes() if node["Alive"]]
    addresses = [node["NodeManagerAddress"] for node in alive]
    return [
        Host(
            node["NodeID"],
            address if addresses.count(address) == 1 else f"{address}/{node['NodeID'][:8]}",
            node["Resources"],
            node["Labels"],
            address,
        )
        for node, address in zip(alive, addresses, strict=True)
    ]


def host_reports(config: ClusterConfig, hosts: Sequence[Host]) -> dict[str, HostReport]:
    look = ray.remote(num_cpus=0, max_retries=0)(preflight.host_report)
    asked = {
        host.name: look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(host.id, soft=False)).remote(
            config, roles
        )
        for host in hosts
        if (roles := preflight.possible_roles(config, host))
    }
    reports: dict[str, HostReport] = {}
    deadline = time.monotonic() + REPORT
    for name, answer in asked.items():
        try:
            reports[name] = ray.get(answer, timeout=max(0.0, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError as error:
            raise InputError(f"{name}: no answer within {REPORT:g} s; expected a host that works") from error
        except ray.exceptions.RayError as error:
            raise InputError(f"{name}: Pilotfish cannot be run there ({_last_line(str(error))})") from error
    return reports


def _setups(config: ClusterConfig) -> dict[Role, str]:
    there = {role: deployment_details(config.application(role), DEPLOYMENTS[role]) for role in _deployed(config)}
    told = {role: details and details["deployment_config"].get("user_config") for role, details in there.items()}
    return {role: (user_config or {}).get("setup", "") for role, user_config in told.items()}


def _wait(config: ClusterConfig, say: Say) -> None:
    deadline = time.monotonic() + config.start_timeout
    waiting = list(config.present)
    while waiting:
        applications = serve.status().applications
        for role in list(waiting):
            status = applications.get(config.application(role))
            if status is not None and status.status == "RUNNING":
                waiting.remove(role)
                say(f"{role}: serves")
            elif status is not None and status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise EngineError(f"{role}: {_problem(status)}")
        if waiting and time.monotonic() > deadline:
            raise EngineError(f"{waiting[0]}: not there within {config.start_timeout:g} s")
        time.sleep(LOOK)


def _problem(status: Any) -> str:
    messages = [deployment.message for deployment in status.deployments.values() if deployment.message]
    return _last_line("\n".join(messages) or status.message)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason was told"


@contextmanager
def members_of(config: ClusterConfig) -> Iterator[Path]:
    with connected(config.address), tempfile.TemporaryDirectory(prefix="pilotfish-") as directory:
        if "target" not in _deployed(config):
            raise ParameterError("cluster", config.name, "one that is up, as `pilotfish cluster up` brings it")
        members = Path(directory) / "members.json"
        with closing(Listing(config, ("target",), members)):
            yield members


def rows(config: ClusterConfig) -> list[dict[str, Any]]:
    there, hosts = _deployed(config), {host.id: host.name for host in cluster_hosts()}
    listing = Listing(config, there)
    with closing(listing):
        listing.wait(TELLING)
        known = {one.id: one for role in there for one in listing.of(role)}
    found = []
    for role in there:
        details = deployment_details(config.application(role), DEPLOYMENTS[role]) or {"replicas": []}
        for replica in details["replicas"]:
            host = hosts.get(replica.get("node_id"), "")
            found.append(_row(role, host, replica["state"].value, known.get(replica["replica_id"])))
    return found


def _row(role: Role, host: str, state: str, one: Listed | None) -> dict[str, Any]:
    about, load = ({}, {}) if one is None else (one.about, one.load)
    shown = {name: value for name, value in load.items() if name not in ("ready", "restarts", "pid")}
    serves = state == "RUNNING" and load.get("ready", True)
    return {
        "role": role,
        "host": host,
        "state": "serves" if serves else "starts again" if state == "RUNNING" else state.lower(),
        **{name: about.get(name, "") for name in ("name", "endpoint", "revision", "version", "model")},
        "pid": load.get("pid"),
        "restarts": load.get("restarts", 0),
        "load": " ".join(f"{name}={value}" for name, value in shown.items()),
    }


def down(config: ClusterConfig) -> None:
    _take_down([config.application(role) for role in _deployed(config)])
    if not serve.status().applications:
        serve.shutdown()


def _deployed(config: ClusterConfig) -> list[Role]:
    applications = serve.status().applications
    return [role for role in ROLES if config.application(role) in applications]


def _take_down(names: Sequence[str]) -> None:
    for name in names:
        serve.delete(name, _blocking=False)
    while set(names) & serve.status().applications.keys():
        time.sleep(LOOK)
