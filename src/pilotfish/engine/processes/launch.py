import logging
import os
import queue
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pilotfish.engine.processes.process import DIRECTORY, WorkerProcess, WorkerSpec
from pilotfish.errors import EngineError

logger = logging.getLogger(__name__)

Status = Literal["starting", "running", "restarting", "failed", "stopped"]
BAD_INPUT = 2  # the exit code of a worker that cannot use what it was given: to start it again would not help
#: Seconds until a worker that ended is started again; twice that the next time, and so on up to `LONGEST_DELAY`.
FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0
HEALTHY = 30.0  # seconds of a run after which the delays begin anew
POLL = 0.01  # seconds between two looks at what nobody tells of
#: Bytes of a temporary directory's path that leave room for a socket's name below it (unix(7): 108, elsewhere 104).
LONGEST_BASE = 64


@dataclass(frozen=True)
class WorkerState:
    name: str
    status: Status = "starting"
    restarts: int = 0
    reason: str = ""  # why it last ended, one line; "" while it never has
    pid: int | None = None  # of its process, while it runs

    @property
    def problem(self) -> str | None:
        return f"{self.name}: {self.reason}" if self.status in ("restarting", "failed") else None


class Supervisor:
    """Keeps workers running until `close`, which also runs when the supervisor is forgotten and when the process exits,
    but not in a fork. If the process is killed, workers that called `die_with_parent` end too.

    >>> with closing(Supervisor()) as supervisor:
    ...     supervisor.start([WorkerSpec("draft 0", [sys.executable, "-m", "pilotfish", "draft", ...])])
    """

    def __init__(self, grace: float = 2.0, changed: Callable[[WorkerState], None] = lambda _: None) -> None:
        """On `close` workers have `grace` seconds to end. `changed` is called on the worker's thread."""
        base = tempfile.gettempdir()
        short = base if len(os.fsencode(base)) <= LONGEST_BASE else "/tmp"
        self.directory = Path(tempfile.mkdtemp(prefix="pilotfish-", dir=short))  # this user's alone, removed on close
        self._changed = changed
        self._workers: list[_Worker] = []
        self._closed = False
        self._shut_down_arguments = (self._workers, self.directory, grace, os.getpid())
        self._finalizer = weakref.finalize(self, _shut_down, *self._shut_down_arguments)

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        """Returns at once. EngineError after `close`."""
        if self._closed:
            raise EngineError("the supervisor is closed")
        for spec in specs:
            where = {**spec.environment, DIRECTORY: str(self.directory)}
            worker = _Worker(replace(spec, environment=where), self._changed)
            self._workers.append(worker)  # before it starts: an interrupt may come in between
            worker.start()

    def poll(self) -> tuple[WorkerState, ...]:
        return tuple(worker.state for worker in self._workers)

    def kill(self, name: str, reason: str) -> None:
        """As after a crash it starts again. From any thread; returns at once."""
        for worker in self._workers:
            if worker.name == name:
                worker.kill(reason)

    def close(self) -> None:
        self._closed = True
        _shut_down(*self._shut_down_arguments)
        self._finalizer.detach()


def _shut_down(workers: "Sequence[_Worker]", directory: Path, grace: float, pid: int) -> None:
    """`pid` is of the process that made the supervisor."""
    if os.getpid() != pid:  # a fork, which has none of the threads
        return
    if threading.current_thread() in workers:  # where a finalizer may run
        threading.Thread(target=_shut_down, args=(workers, directory, grace, pid)).start()
        return
    alive = [worker for worker in workers if worker.is_alive()]
    try:
        for worker in alive:
            worker.terminate()
        deadline = time.monotonic() + grace
        for worker in alive:
            worker.join(max(0.0, deadline - time.monotonic()))
    finally:  # after an interrupt too
        for worker in alive:  # all, before any is waited for
            worker.terminate()
            worker.kill("")
        for worker in alive:
            worker.join()
        shutil.rmtree(directory, ignore_errors=True)


class _Worker(threading.Thread):
    """Lasts as long as the worker's runs (see WorkerProcess). Other threads read `state`, `kill` and `terminate`."""

    def __init__(self, spec: WorkerSpec, changed: Callable[[WorkerState], None]) -> None:
        super().__init__(name=spec.name, daemon=True)
        self.state = WorkerState(spec.name)
        self._spec, self._changed = spec, changed
        self._process: WorkerProcess | None = None
        self._kill_reason = ""  # why it was killed
        self._closing = False
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()  # put is safe in a finalizer

    def kill(self, reason: str) -> None:
        self._kill_reason = reason
        if (process := self._process) is not None:
            process.kill()

    def terminate(self) -> None:
        self._closing = True
        self._wakes.put(None)
        if (process := self._process) is not None:
            process.terminate()

    def run(self) -> None:
        crashes = 0  # since it last was healthy
        while not self._closing:
            began = time.monotonic()
            reason, again = self._run_once()
            crashes = 1 if time.monotonic() - began >= HEALTHY else crashes + 1
            if self._closing:
                break
            self._change(status="restarting" if again else "failed", reason=reason, pid=None)
            logger.warning("%s: %s; %s", self.name, reason, "it is started again" if again else "it stays down")
            if not again:
                return
            self._pause(delay_after(crashes))
        self._change(status="stopped", pid=None)

    def _run_once(self) -> tuple[str, bool]:
        restarts = self.state.restarts + (self.state.status == "restarting")
        self._kill_reason = ""
        try:
            process = self._process = WorkerProcess(self._spec)
        except (OSError, RuntimeError) as error:  # RuntimeError: there can be no more threads
            self.state = replace(self.state, restarts=restarts)
            return f"cannot be started: {error}", self._spec.restarts
        self._change(status="running", restarts=restarts, pid=process.pid)
        if self._closing:  # `terminate` may have come before there was a process
            process.kill()
        process.wait()
        ending, self._process = process.end(), None
        again = bool(self._kill_reason) or ending.code != BAD_INPUT
        return self._kill_reason or str(ending), again and self._spec.restarts

    def _pause(self, seconds: float) -> None:
        with suppress(queue.Empty):
            self._wakes.get(timeout=seconds)

    def _change(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)
        self._changed(self.state)


def delay_after(crashes: int) -> float:
    return min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** min(crashes - 1, 64))


def wait_until(ready: Callable[[], bool], problem: Callable[[], str | None], timeout: float, what: str) -> None:
    """EngineError with the `problem` once there is one, or naming `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not ready():
        if (found := problem()) is not None:
            raise EngineError(found)
        if time.monotonic() >= deadline:
            raise EngineError(f"{what}: not ready within {timeout:g} s")
        time.sleep(POLL)
