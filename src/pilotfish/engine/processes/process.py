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

#: Environment variables of a worker: the process id of its parent, the directory of its sockets, and how it logs (json
#: or text).
PARENT, DIRECTORY, LOG_FORMAT = "PILOTFISH_PARENT", "PILOTFISH_DIRECTORY", "PILOTFISH_LOG_FORMAT"
#: Environment variables that size the thread pools of torch and its libraries.
THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
LONGEST_LINE = 1 << 16  # characters; a longer line of a worker is passed on in pieces
#: Seconds to read what an ended worker has written.
LAST_WORDS = 1.0
_PR_SET_PDEATHSIG = 1  # prctl(2)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
#: Bytes of the largest memory that is kept once it was freed, and of all that is kept in each of malloc's heaps.
LARGEST_KEPT, MOST_KEPT = 32 << 20, 64 << 20


@dataclass(frozen=True)
class WorkerSpec:
    name: str  # as in "draft 0"
    command: Sequence[str]
    cores: frozenset[int] = frozenset()  # empty: those of the parent
    environment: Mapping[str, str] = field(default_factory=dict)  # added to the parent's own
    restarts: bool = True  # whether it is started again after a crash
    told: Callable[[str], None] | None = None  # called with each line of its stdout, on a thread


@dataclass(frozen=True)
class Ending:
    code: int  # negative: the signal that ended it
    last_line: str  # of its stderr; "" if it wrote none

    def __str__(self) -> str:
        """Omits the last line of stderr after a requested end, or if it is a JSON log record."""
        by_signal = f"was ended by signal {-self.code} ({signal.strsignal(-self.code)})" if self.code < 0 else ""
        how = by_signal or f"exited with code {self.code}"
        failed = self.code not in (0, -signal.SIGKILL, -signal.SIGTERM)
        explained = failed and self.last_line and not self.last_line.startswith("{")
        return f"{how}: {self.last_line}" if explained else how


class WorkerProcess:
    """It has a session of its own, so that Ctrl-C reaches only the parent, and runs on its cores from its first
    instruction. Its stderr, and its stdout if nobody is told of it, go to the parent's stderr.

    The worker dies with the *thread* that makes this (prctl(2), PR_SET_PDEATHSIG), which therefore must last."""

    def __init__(self, spec: WorkerSpec) -> None:
        environment = worker_environment(spec)
        with on_cores(spec.cores):
            self._process = subprocess.Popen(
                list(spec.command),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=2 if spec.told is None else subprocess.PIPE,  # the parent's stdout is for its own results
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._name, self._last_line = spec.name, ""
        self._logs_json = environment.get(LOG_FORMAT) == "json"
        self._reader = threading.Thread(target=self._pass_on, name=f"stderr of {spec.name}", daemon=True)
        self._reader.start()
        if spec.told is not None:
            threading.Thread(target=self._tell, args=(spec.told,), name=f"stdout of {spec.name}", daemon=True).start()

    def _tell(self, told: Callable[[str], None]) -> None:
        assert self._process.stdout is not None
        with io.TextIOWrapper(self._process.stdout, errors="replace", newline="") as stream:
            for line in iter(partial(stream.readline, LONGEST_LINE), ""):
                told(line)

    def _pass_on(self) -> None:
        assert self._process.stderr is not None
        with io.TextIOWrapper(self._process.stderr, errors="replace", newline="") as stream:
            for line in iter(partial(stream.readline, LONGEST_LINE), ""):
                self._last_line = printable(line.strip()) or self._last_line
                with suppress(OSError, ValueError):  # closed: read on, or the worker would block
                    self._show(line)

    def _show(self, line: str) -> None:
        if self._logs_json and not line.startswith("{"):
            if line.strip():
                logger.warning("%s: %s", self._name, line.strip())
            return
        body = line.rstrip("\r\n")
        sys.stderr.write(printable_output(body) + ("\n" if len(body) < len(line) else ""))
        sys.stderr.flush()

    def wait(self) -> None:
        """Until `end`, its id stays its own, unless a signal was sent to it since."""
        with suppress(ChildProcessError):  # a signal to it came later, and took note of its end
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    def terminate(self) -> None:
        """From any thread."""
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> Ending:
        with suppress(ProcessLookupError, PermissionError):  # none runs
            os.killpg(self.pid, signal.SIGKILL)
        code = self._process.wait()
        self._reader.join(LAST_WORDS)
        return Ending(code, self._last_line)


@contextmanager
def on_cores(cores: frozenset[int]) -> Iterator[None]:
    """For this thread, and processes that it starts meanwhile; empty changes nothing."""
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
    threads = dict.fromkeys(THREAD_COUNTS, str(len(spec.cores))) if spec.cores else {}
    return {**os.environ, **threads, **spec.environment, PARENT: str(os.getpid())}


def command_of(role: str, **options: object) -> list[str]:
    return [sys.executable, "-m", "pilotfish", role, *(f"--{option}={value}" for option, value in options.items())]


# -- in the worker


def supervised() -> bool:
    return PARENT in os.environ


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """This process ends by signal `number` when its supervisor's process ends in any way."""
    parent = os.environ.pop(PARENT, None)
    if parent is None:
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number))
    if os.getppid() != int(parent):  # the parent has ended before this call
        remove_directory()
        os._exit(1)


def remove_directory() -> None:
    if directory := os.environ.get(DIRECTORY):
        shutil.rmtree(directory, ignore_errors=True)


def keep_freed_memory() -> None:
    """malloc would return freed memory, and the system clear every page of the next: as slow as several copies."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc's
        libc.mallopt(_M_MMAP_THRESHOLD, LARGEST_KEPT)
        libc.mallopt(_M_TRIM_THRESHOLD, MOST_KEPT)


def name_process(role: str) -> None:
    setproctitle(f"pilotfish: {role}")


class Stopped(BaseException):
    """A signal came before the worker's loop ran."""


def heeded(numbers: Iterable[int]) -> list[int]:
    """Without signals that this process was started to ignore, as `nohup` and a shell's background jobs are."""
    return [n for n in numbers if n == signal.SIGTERM or signal.getsignal(n) != signal.SIG_IGN]


class Signals:
    """SIGTERM, SIGINT, and SIGHUP, which tells of the parent's end. They raise Stopped until `call` names a function to
    call instead. A process without a supervisor takes only those that are `heeded`.

    Signals interrupt each other's handlers: a parent's end sends SIGHUP for each of its threads. So nothing here waits
    for a lock that the interrupted handler may hold."""

    def __init__(self) -> None:
        self.received = 0  # the last one
        self._stop: Callable[[], None] | None = None

    def call(self, stop: Callable[[], None]) -> None:
        """Calls `stop` at once after a signal whose Stopped was lost, as in a `__del__`."""
        self._stop = stop
        if self.received:
            stop()

    @property
    def stopped(self) -> bool:
        return bool(self.received) and self._stop is None

    def __enter__(self) -> "Signals":
        all_three = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        numbers = all_three if supervised() else heeded(all_three)
        self._before = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: object) -> None:
        first, self.received = not self.received, number
        if self._stop is not None:
            self._stop()
        elif first:
            raise Stopped


def run_worker(role: str, work: Callable[[Signals], None]) -> None:
    """A signal before `Signals.call` ends it at once."""
    name_process(role)
    signals = Signals()
    with signals:  # from here on there are processes to end
        try:
            die_with_parent(signal.SIGHUP)
            work(signals)
        except (Stopped, Exception):
            if not signals.stopped:  # a library's clean-up that Stopped interrupted may raise something else
                raise
    if signals.received == signal.SIGHUP:
        remove_directory()
