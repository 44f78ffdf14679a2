"""A worker process under an actor of Ray Serve, which is as healthy as the worker. Ray replaces an actor whose worker
stays down, and one that is lost with its host."""

import asyncio
import logging
import socket
import threading
from time import monotonic
from typing import Any

import ray
from ray import serve

from pilotfish.cluster.config import ALLOW, MEMBERS, ClusterConfig, Role, worker_command
from pilotfish.cluster.listing import introduction
from pilotfish.engine.processes.launch import Supervisor, WorkerState
from pilotfish.engine.processes.process import WorkerSpec
from pilotfish.errors import EngineError, ParameterError
from pilotfish.wire.curve_keys import load_key_pair

logger = logging.getLogger(__name__)

#: Seconds that a worker has to end.
GRACE = 20.0
#: Seconds between two looks at a worker that starts.
LOOK = 0.1


class Worker:
    def __init__(self, config: ClusterConfig, role: Role) -> None:
        self._config, self._role = config, role
        self._port = reserved_port(ray.util.get_node_ip_address())
        host, port = self._port.getsockname()
        self.endpoint = f"tcp://{host}:{port}"
        key = "" if config.key is None else load_key_pair("key", config.key).public
        self.about = introduction(config, role, own_id(config, role), self.endpoint, key)
        self._key, self._name = key, self.about["name"]
        self._ready = threading.Event()
        self._state = WorkerState(self._name)
        self._began = monotonic()  # when it last was started
        self._supervisor = Supervisor(GRACE, self._note)
        self.members = self._supervisor.directory / MEMBERS

    async def start(self) -> None:
        """Returns once it serves. EngineError if it cannot, or takes too long."""
        directory = self._supervisor.directory
        if self._key:
            (directory / ALLOW).write_text(f"{self._key} {self._config.name}\n")
        command = worker_command(self._config, self._role, self.endpoint, self._name, directory)
        environment = self._config.of(self._role).environment
        self._supervisor.start([WorkerSpec(self._name, command, environment=environment, told=self._told)])
        while not self.ready:
            self.check()
            await asyncio.sleep(LOOK)

    def check(self) -> None:
        """EngineError if the worker stays down, or is not ready again in time."""
        if self._state.status == "failed":
            raise EngineError(self._state.problem or self._name)
        if not self.ready and monotonic() - self._began > self._config.start_timeout:
            raise EngineError(f"{self._name}: not ready within {self._config.start_timeout:g} s")

    @property
    def ready(self) -> bool:
        return self._ready.is_set()

    @property
    def load(self) -> dict[str, Any]:
        return {"ready": self.ready, "restarts": self._state.restarts, "pid": self._state.pid}

    def kill(self, reason: str) -> None:
        self._supervisor.kill(self._name, reason)

    def close(self) -> None:
        self._supervisor.close()
        self._port.close()

    def _told(self, line: str) -> None:
        logger.info("%s serves: %s", self._name, line.strip())
        self._ready.set()

    def _note(self, state: WorkerState) -> None:
        if state.pid is None:
            self._ready.clear()
        elif state.pid != self._state.pid:
            self._began = monotonic()
        self._state = state


def own_id(config: ClusterConfig, role: Role) -> str:
    """ParameterError if its application is not named as other roles look for it."""
    context = serve.get_replica_context()
    if context.app_name != config.application(role):
        raise ParameterError("applications", context.app_name, config.application(role))
    own: str = context.replica_id.unique_id
    return own


def reserved_port(host: str) -> socket.socket:
    """A port that no other process gets by chance: only the worker, which may restart, listens there; both allow reuse
    (SO_REUSEADDR), and this socket never listens."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((host, 0))
    return reserved
