import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pilotfish.config.engine import EngineConfig
from pilotfish.config.server import ServerConfig
from pilotfish.core.peers.fields import Peer
from pilotfish.engine.processes.host_memory import divided
from pilotfish.engine.processes.launch import WorkerState
from pilotfish.engine.processes.placement import equal_parts
from pilotfish.engine.targets.members import Member
from pilotfish.engine.targets.servers import Attendance, Silence
from pilotfish.engine.targets.stream import OpenRequest
from pilotfish.errors import ParameterError
from pilotfish.wire.serving import Status

TARGET = "target"
#: Options that several targets of a host cannot share, and what each may have instead.
ALONE = {
    "draft_cores": "none with replicas, each of which divides its own cores",
    "prefill_cores": "none with replicas, each of which divides its own cores",
    "trace": "none with replicas: a timeline is of one target",
    "kv_disk": "none with replicas: a directory belongs to one target",
}


@dataclass(frozen=True)
class OwnTarget:
    name: str
    config: EngineConfig
    cores: frozenset[int] = frozenset()  # of its process, and of the workers that it starts; empty: those of the server


def num_own(config: EngineConfig, server: ServerConfig) -> int:
    if server.replicas is not None:
        return server.replicas
    return int(not server.target_pool and config.members is None)


def own_targets(config: EngineConfig, count: int, name: str = TARGET) -> list[OwnTarget]:
    """Several divide the cores and memory of one. ParameterError for what they cannot divide."""
    if count <= 1:
        return [OwnTarget(name, config)] * count
    for field, allowed in ALONE.items():
        if value := getattr(config, field):
            raise ParameterError(field, str(value), allowed)
    if not config.device.startswith("cpu"):
        allowed = "cpu with replicas; elsewhere one `pilotfish target` for each device, and --target-pool"
        raise ParameterError("device", config.device, allowed)
    cores = equal_parts(config.core_set or frozenset(os.sched_getaffinity(0)), count)
    each = replace(divided(config, count), cores="")
    return [OwnTarget(f"{name} {i}", each, part) for i, part in enumerate(cores)]


#: Seconds without a Beat after which a target is not ready, and seconds in one step.
SILENCE, LONG_STEP = 2.0, 30.0
#: Seconds in one step after which a target is killed; also seconds of silence while it loads, because some libraries
#: let no other thread run meanwhile.
ENDLESS = 300.0
RETRY = 2.0  # seconds after which a client should try a silent target again


@dataclass(frozen=True)
class ReplicaHealth:
    name: str
    ready: bool = True
    reason: str = ""  # why not ready, in one line; "" if ready
    retry_after: float = 0.0  # seconds until it may be ready, estimated from the duration of the last start
    restarts: int = 0  # of its process, where the server has started it
    failed: bool = False  # whether it stays down
    requests: int = 0  # of this server, that it has
    status: Status | None = None

    def told(self) -> dict[str, Any]:
        told = {"name": self.name, "ready": self.ready, "reason": self.reason, "requests": self.requests}
        if self.status is None:
            return told
        load = {"running": self.status.running, "waiting": self.status.waiting, "free_slots": self.status.free_slots}
        identity = self.status.identity
        return {**told, **load, "version": identity.version, "fingerprint": identity.fingerprint}


@dataclass
class RoutedTokens:
    prompt: int = 0
    expected: int = 0  # whose KV the target was believed to have
    found: int = 0  # whose KV it had
    missed: int = 0  # that were believed to be there, and were not

    def count(self, prompt: int, expected: int, found: int) -> None:
        self.prompt += prompt
        self.expected += expected
        self.found += found
        self.missed += max(expected - found, 0)


class Replica:
    """The event loop changes it. The channel's thread tells `silence` and `step`, and reads what it needs to."""

    def __init__(self, member: Member, clock: Callable[[], float], worker: WorkerState | None = None) -> None:
        self.member = member
        self.name = member.label
        self.id = member.endpoint if worker is None else member.name  # for routing: the same one in all servers
        self.worker = worker
        self.peer: Peer | None = None  # once it is dialled
        self.problem = ""  # why there is no connection to it, where it is elsewhere
        self.declined = ""  # why it does not want this server, or this server does not want it
        self.draining = member.draining
        self.attendance = Attendance()  # of the target there, once that has said that it is ready
        self.status: Status | None = None  # the last one
        self.fingerprint = ""  # of the target there or, until there is one, of the last one
        self.silence = Silence()
        self.step = 0.0  # seconds that the target's step had lasted at the last Beat
        self.attended = 0.0  # when the last Attend left
        self.requests: dict[int, OpenRequest] = {}  # by the number under which the target has it
        self.last = ""  # incarnation of the target before: its last messages may still arrive
        self._clock = clock
        self._began = clock()  # when its process was started, or it was first dialled
        self._start_seconds: float | None = None  # that the last start took until the target was ready

    # -- whether it can be asked

    @property
    def serving(self) -> bool:
        return bool(self.attendance.incarnation)

    @property
    def obstacle(self) -> str:
        """Why requests cannot be sent there; "" if they can."""
        found = self.declined or (self._absence() if not self.serving or self.problem else "")
        if not found and self.silence.seconds > SILENCE:
            found = f"silent for {self.silence.seconds:.0f} s"
        elif not found and self.step > LONG_STEP:
            found = f"in one step for {self.step:.0f} s"
        return found and f"{self.name}: {found}"

    @property
    def takes(self) -> bool:
        return not self.draining and not self.obstacle

    @property
    def failed(self) -> bool:
        return self.worker is not None and self.worker.status == "failed"

    @property
    def retry_after(self) -> float:
        """Estimated seconds until it is ready: as long as the last start; in the first, as long again as so far."""
        if self.serving:
            return RETRY
        passed = self._clock() - self._began
        return passed if self._start_seconds is None else max(self._start_seconds - passed, 0.0)

    @property
    def health(self) -> ReplicaHealth:
        obstacle = self.obstacle or ("draining" if self.draining else "")
        restarts = 0 if self.worker is None else self.worker.restarts
        return ReplicaHealth(
            self.name, not obstacle, obstacle, self.retry_after, restarts, self.failed, len(self.requests), self.status
        )

    def _absence(self) -> str:
        if self.worker is None:
            return self.problem or "loading"
        if self.worker.problem is None:
            return "loading"
        return f"{self.worker.reason}; it {'stays down' if self.failed else 'is started again'}"

    # -- what becomes of it

    def note_worker(self, state: WorkerState) -> bool:
        assert self.worker is not None  # or nobody would know
        before, self.worker = self.worker, state
        if state.pid != before.pid:
            self._began = self._clock()
            self.silence, self.step = Silence(), 0.0
        gone = state.pid is None and before.pid is not None
        if gone:
            self.forget()
        return gone

    def note_status(self, status: Status) -> None:
        if not self.serving:
            self.silence.heard()
            self.attendance = Attendance(status.incarnation)
            self._start_seconds = self._clock() - self._began
        self.status, self.fingerprint = status, status.identity.fingerprint

    def forget(self) -> None:
        if self.worker is not None:  # elsewhere it may change its mind, and nothing of it comes late
            self.last = self.attendance.incarnation or self.last
        self.attendance, self.status, self.declined = Attendance(), None, ""

    def look(self, timeout: float) -> str:
        """Why it is to be given up; "" if it is not. A silent target has `timeout` seconds. Called regularly."""
        # The limit is read before the silence: a target that gets ready in between has just been heard.
        limit = timeout if self.serving else ENDLESS
        if self.silence.look(self._clock()) > limit:
            return f"was silent for {limit:g} s"
        return f"was in one step for {ENDLESS:g} s" if self.step > ENDLESS else ""
