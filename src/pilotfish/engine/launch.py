"""Workers in processes of their own: started, watched, restarted, shut down."""

from __future__ import annotations

import logging
import math
import os
import queue
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pilotfish.engine.process import DIRECTORY, WorkerProcess, WorkerSpec
from pilotfish.errors import EngineError

logger = logging.getLogger(__name__)

Status = Literal["starting", "running", "restarting", "failed", "stopped"]
#: The exit code of a worker that cannot use what it was given: to start it again would not help.
BAD_INPUT = 2
#: Seconds between two looks at what nobody tells of.
POLL = 0.01
#: Bytes of a temporary directory's path that leave room for a socket's name below it (unix(7): 108, elsewhere 104).
LONGEST_BASE = 64


@dataclass(frozen=True)
class Delays:
    """Seconds. A worker that ended is started again after `first`, twice that the next time, and so on up to
    `longest`; one that had run for `healthy` begins anew. On shutdown workers have `grace` to end by themselves."""

    first: float = 0.1
    longest: float = 5.0
    healthy: float = 30.0
    grace: float = 2.0

    def restart(self, crashes: int) -> float:
        """Before the next start after so many crashes, 1 or more, none of them after a healthy run."""
        return min(self.longest, self.first * 2.0 ** min(crashes - 1, 64))


@dataclass(frozen=True)
class WorkerState:
    """State of a worker at a moment."""

    name: str
    status: Status = "starting"
    restarts: int = 0
    reason: str = ""  # why it last ended, one line; "" while it never has
    pid: int | None = None  # of its process, while it runs

    @property
    def problem(self) -> str | None:
        """Why a worker is down, in one line."""
        return f"{self.name}: {self.reason}" if self.status in ("restarting", "failed") else None


class Supervisor:
    """Starts workers and keeps them running until `close`, which also runs at the end of a `with`, when the supervisor
    is forgotten, and when the process exits. Where the process is killed, workers that called `die_with_parent` go too.

    >>> with Supervisor() as supervisor:
    ...     supervisor.start([WorkerSpec("draft 0", [sys.executable, "-m", "pilotfish", "draft", ...])])
    """

    def __init__(self, delays: Delays | None = None, changed: Callable[[WorkerState], None] = lambda _: None) -> None:
        """`changed` is called with each new state of a worker, on a thread of the supervisor's."""
        self._thread = _SupervisorThread(delays or Delays(), changed)
        weakref.finalize(self, self._thread.close)

    @property
    def directory(self) -> Path:
        """For sockets: this user's alone, short, and removed on close."""
        return self._thread.directory

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        """Returns at once. EngineError after `close`."""
        self._thread.start(specs)

    def poll(self) -> tuple[WorkerState, ...]:
        """All workers, in the order of their start."""
        return tuple(worker.state for worker in self._thread.workers)

    def kill(self, name: str, reason: str) -> None:
        """Kill a worker, to be started again like one that has crashed, for that reason. From any thread; returns at
        once."""
        self._thread.kill(name, reason)

    def close(self) -> None:
        """End all workers: ask, wait, then kill. Closing twice is fine."""
        self._thread.close()

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _SupervisorThread:
    """Starts and ends processes, in one thread that lives as long as they may (see WorkerProcess). It does not keep the
    Supervisor alive. In a fork of this process there is no such thread."""

    def __init__(self, delays: Delays, changed: Callable[[WorkerState], None]) -> None:
        self.directory = _socket_directory()
        self.workers: tuple[_Worker, ...] = ()
        self._delays = delays
        self._changed = changed
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False: end; put is safe in a finalizer
        self._thread = threading.Thread(target=self._run, name="supervisor", daemon=True)
        self._thread.start()

    def start(self, specs: Sequence[WorkerSpec]) -> None:
        if not self._thread.is_alive():
            raise EngineError("the supervisor is closed")
        where = {DIRECTORY: str(self.directory)}
        known = [replace(spec, environment={**spec.environment, **where}) for spec in specs]
        self.workers += tuple(_Worker(spec, self._delays, self._look, self._changed) for spec in known)
        self._look()

    def kill(self, name: str, reason: str) -> None:
        for worker in self.workers:
            if worker.state.name == name:
                worker.kill_reason = reason
        self._look()

    def _look(self) -> None:
        self._orders.put(True)

    def close(self) -> None:
        self._orders.put(False)
        if threading.current_thread() is not self._thread:  # where a finalizer may run
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._wait():
                for worker in self.workers:
                    worker.check(time.monotonic())
        finally:
            self._shut_down()

    def _wait(self) -> bool:
        """Until there is something to do for a worker; False to end."""
        due = min((worker.due for worker in self.workers), default=math.inf)
        try:
            return self._orders.get(timeout=None if due == math.inf else max(0.0, due - time.monotonic()))
        except queue.Empty:
            return True

    def _shut_down(self) -> None:
        for worker in self.workers:
            worker.terminate()
        deadline = time.monotonic() + self._delays.grace
        while any(worker.running for worker in self.workers) and time.monotonic() < deadline:
            time.sleep(POLL)
        for worker in self.workers:
            worker.stop()
        shutil.rmtree(self.directory, ignore_errors=True)


class _Worker:
    """A worker over all its runs. Other threads than the supervisor's may read `state` and write `kill_reason`."""

    def __init__(
        self, spec: WorkerSpec, delays: Delays, look: Callable[[], None], changed: Callable[[WorkerState], None]
    ) -> None:
        """`look` has the supervisor call `check`."""
        self.state = WorkerState(spec.name)
        self.kill_reason = ""  # why it is to be killed
        self._spec = spec
        self._delays = delays
        self._look = look
        self._changed = changed
        self._process: WorkerProcess | None = None
        self._crashes = 0  # since it last was healthy
        self._started = 0.0
        self.due = -math.inf  # when to start it; inf: not at all, or it runs

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.running

    def check(self, now: float) -> None:
        """Start it when it is due, notice that it ended, kill it on request."""
        if self._process is None and now >= self.due:
            self._start(now)
        elif self._process is not None and self.kill_reason:
            self._process.end()
            self._process = None
            self._ended(self.kill_reason, now, again=True)
        elif self._process is not None and not self._process.running:
            ending, self._process = self._process.end(), None
            self._ended(str(ending), now, again=ending.code != BAD_INPUT)

    def _start(self, now: float) -> None:
        restarts = self.state.restarts + (self.state.status == "restarting")
        self._started, self.kill_reason, self.due = now, "", math.inf
        try:
            process = self._process = WorkerProcess(self._spec)
        except OSError as error:
            self.state = replace(self.state, restarts=restarts)
            self._ended(f"cannot be started: {error}", now, again=True)
        else:
            self._change(status="running", restarts=restarts, pid=process.pid)
            threading.Thread(target=self._await_end, args=(process,), name=self._spec.name, daemon=True).start()

    def _await_end(self, process: WorkerProcess) -> None:
        process.wait()
        self._look()

    def _change(self, **changes: Any) -> None:
        self.state = replace(self.state, **changes)
        self._changed(self.state)

    def _ended(self, reason: str, now: float, again: bool) -> None:
        self._crashes = 1 if now - self._started >= self._delays.healthy else self._crashes + 1
        self.due = now + self._delays.restart(self._crashes) if again else math.inf
        self._change(status="restarting" if again else "failed", reason=reason, pid=None)
        logger.warning("%s: %s; %s", self._spec.name, reason, "it is started again" if again else "it stays down")

    def terminate(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def stop(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None
        if self.state.status != "failed":  # whose reason stays
            self._change(status="stopped", pid=None)


def _socket_directory() -> Path:
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix="pilotfish-", dir=base if len(os.fsencode(base)) <= LONGEST_BASE else "/tmp"))


def wait_until(ready: Callable[[], bool], problem: Callable[[], str | None], timeout: float, what: str) -> None:
    """Return once `ready`. EngineError with the `problem` once there is one, or naming `what` was waited for after
    `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not ready():
        if (found := problem()) is not None:
            raise EngineError(found)
        if time.monotonic() >= deadline:
            raise EngineError(f"{what}: not ready within {timeout:g} s")
        time.sleep(POLL)
