"""A worker as a process: how its parent starts and ends it, and what it does itself to be one."""

from __future__ import annotations

import ctypes
import io
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from setproctitle import setproctitle

from pilotfish.printable import printable, printable_output

logger = logging.getLogger(__name__)

#: In a worker's environment: the process id of its parent.
PARENT = "PILOTFISH_PARENT"
#: And the directory of its sockets.
DIRECTORY = "PILOTFISH_DIRECTORY"
#: And how a server's workers log, json or text.
LOG_FORMAT = "PILOTFISH_LOG_FORMAT"
#: What sizes the thread pools of torch and its libraries.
THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
#: Characters; a longer line of a worker is passed on in pieces.
LONGEST_LINE = 1 << 16
#: Seconds to read what an ended worker has written.
LAST_WORDS = 1.0
_PR_SET_PDEATHSIG = 1  # prctl(2)


@dataclass(frozen=True)
class WorkerSpec:
    """What to start. `environment` adds to the parent's own."""

    name: str  # as in "draft 0"
    command: Sequence[str]
    cores: frozenset[int] = frozenset()  # empty: those of the parent
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ending:
    """How a process ended."""

    code: int  # negative: the signal that ended it
    last_line: str  # of its stderr; "" where it wrote none

    def __str__(self) -> str:
        """One line. Omits the last line of stderr where it explains nothing: after an end that was asked for, or where
        it is a JSON record of the log."""
        by_signal = f"was ended by signal {-self.code} ({signal.strsignal(-self.code)})" if self.code < 0 else ""
        how = by_signal or f"exited with code {self.code}"
        failed = self.code not in (0, -signal.SIGKILL, -signal.SIGTERM)
        explained = failed and self.last_line and not self.last_line.startswith("{")
        return f"{how}: {self.last_line}" if explained else how


class WorkerProcess:
    """One run of a worker: in a session of its own, so that Ctrl-C on the terminal is its parent's alone, on its cores
    from its first instruction, with stdout and stderr passed on to the parent's stderr.

    The worker dies with the *thread* that makes this (prctl(2), PR_SET_PDEATHSIG), which therefore must last."""

    def __init__(self, spec: WorkerSpec) -> None:
        """OSError where it cannot be started."""
        environment = worker_environment(spec)
        with on_cores(spec.cores):
            self._process = subprocess.Popen(
                list(spec.command),
                env=environment,
                stdin=subprocess.PIPE,  # nothing is written: where there is no prctl, its end tells that of the parent
                stdout=2,  # that of the parent is for its own results
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._name, self._last_line = spec.name, ""
        self._logs_json = environment.get(LOG_FORMAT) == "json"
        self._reader = threading.Thread(target=self._pass_on, name=f"stderr of {spec.name}", daemon=True)
        self._reader.start()

    def _pass_on(self) -> None:
        assert self._process.stderr is not None
        with io.TextIOWrapper(self._process.stderr, errors="replace", newline="") as stream:
            for line in iter(partial(stream.readline, LONGEST_LINE), ""):
                self._last_line = printable(line.strip()) or self._last_line
                with suppress(OSError, ValueError):  # nobody reads, or it is closed: the worker must not block
                    self._show(line)

    def _show(self, line: str) -> None:
        """Where lines are JSON, one that is not, a library's or a traceback's, becomes the message of one that is."""
        if self._logs_json and not line.startswith("{"):
            if line.strip():
                logger.warning("%s: %s", self._name, line.strip())
            return
        sys.stderr.write(_shown(line))
        sys.stderr.flush()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def end(self) -> Ending:
        """Kill it and what it has started itself, as far as they run; free all."""
        with suppress(ProcessLookupError, PermissionError):  # nothing runs
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._reader.join(LAST_WORDS)
        return Ending(code, self._last_line)


def _shown(line: str) -> str:
    """A worker's line, or a piece of one, as this process prints it: it may quote what others sent."""
    body = line.rstrip("\r\n")
    return printable_output(body) + ("\n" if len(body) < len(line) else "")


@contextmanager
def on_cores(cores: frozenset[int]) -> Iterator[None]:
    """This thread runs on `cores`, which a process that it starts inherits; empty: as it was."""
    if not cores:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def worker_environment(spec: WorkerSpec) -> dict[str, str]:
    """All variables of a worker of this process."""
    threads = dict.fromkeys(THREAD_COUNTS, str(len(spec.cores))) if spec.cores else {}
    return {**os.environ, **threads, **spec.environment, PARENT: str(os.getpid())}


# -- in the worker


def supervised() -> bool:
    """Whether a Supervisor started this process, as long as `die_with_parent` was not called."""
    return PARENT in os.environ


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have this process end, by signal `number` where there is prctl(2), when its parent does, however that ends, where
    a Supervisor started it."""
    parent = os.environ.pop(PARENT, None)
    if parent is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number))
        if os.getppid() != int(parent):  # it was gone before
            remove_directory()
            os._exit(1)
    else:
        threading.Thread(target=_exit_after_stdin, name="parent watch", daemon=True).start()


def remove_directory() -> None:
    """Remove the directory of the Supervisor that started this process: for when that is gone and cannot."""
    if directory := os.environ.get(DIRECTORY):
        shutil.rmtree(directory, ignore_errors=True)


def _exit_after_stdin() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)


def name_process(role: str) -> None:
    """The title of this process in `ps` and `top`: "pilotfish: draft 0" for the role "draft 0"."""
    setproctitle(f"pilotfish: {role}")


class Stopped(BaseException):
    """A signal came before there was a loop to end."""


def heeded(numbers: Iterable[int]) -> list[int]:
    """Those that this process was not started to ignore, as `nohup` and a shell's background jobs are; always
    SIGTERM."""
    return [n for n in numbers if n == signal.SIGTERM or signal.getsignal(n) != signal.SIG_IGN]


class Signals:
    """SIGTERM, SIGINT, and SIGHUP, which tells that the parent is gone: once `wake` is set they call it, with `stopped`
    true; before they raise Stopped. Where nobody supervises this process only those that are `heeded` do.

    They come while another one is handled too: a parent's end sends SIGHUP for each of its threads. So nothing here
    waits for a lock that the interrupted handler may hold."""

    def __init__(self) -> None:
        self._stopped = False
        self.received = 0
        self.wake: Callable[[], None] | None = None

    def stopped(self) -> bool:
        """Whether one has come."""
        return self._stopped

    def __enter__(self) -> Signals:
        all_three = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        numbers = all_three if supervised() else heeded(all_three)
        self._before = {number: signal.signal(number, self._stop) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _stop(self, number: int, _: object) -> None:
        first, self._stopped, self.received = not self._stopped, True, number
        if self.wake is not None:
            self.wake()
        elif first:
            raise Stopped
