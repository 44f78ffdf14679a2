"""Programs that benches start: servers, draft pools, networks before them; and CPU and memory of processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pilotfish.bench.proxy import HOST
from pilotfish.config.engine import EngineConfig
from pilotfish.engine.drafts.remote_drafts import RemoteDrafts
from pilotfish.engine.engine import Engine
from pilotfish.engine.pools.remote_pools import worker_command
from pilotfish.engine.processes.placement import split_cores
from pilotfish.engine.processes.process import WorkerSpec, on_cores, worker_environment
from pilotfish.errors import EngineError

#: Seconds that a program may take to end before it is killed.
END = 30.0
PAGE = os.sysconf("SC_PAGE_SIZE")
TICK = os.sysconf("SC_CLK_TCK")
#: What every process of a server is called in `ps`.
TITLE = "pilotfish: "
SERVER_OPTIONS = (
    *("target", "draft", "mode", "drafter", "nodes", "levels", "width", "leaves", "budget", "dtype", "quantization"),
    *("threads", "cores", "kv_slots", "kv_dtype", "kv_host_memory", "kv_disk", "kv_disk_size", "max_requests", "pace"),
)


class Program(subprocess.Popen[bytes]):
    """A process that tells, in JSON on the first line of its stdout, that it is ready; some answer each line of JSON
    with another then. It ends with the `with`, and with the thread that has started it; its stderr goes to a file."""

    def __init__(
        self, spec: WorkerSpec, ending: signal.Signals = signal.SIGKILL, stdin: int = subprocess.DEVNULL
    ) -> None:
        """`ending` is the signal that ends it; `stdin` is a pipe for those that are asked."""
        self._name, self._ending = spec.name, ending
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the program runs
        with on_cores(spec.cores):
            super().__init__(
                list(spec.command),
                env=worker_environment(spec),
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=self._log,
                process_group=0,  # not a session: Linux shares cores between sessions first, then between threads
            )

    @cached_property
    def told(self) -> dict[str, Any]:
        """The first line. Waits for it; EngineError where the program ends instead."""
        return self._heard()

    def ask(self, **question: Any) -> dict[str, Any]:
        """The answer to a question. EngineError where the program ends instead."""
        assert self.stdin is not None and self.told is not None
        with suppress(BrokenPipeError):  # it has ended, and what it wrote last says why
            self.stdin.write(json.dumps(question).encode() + b"\n")
            self.stdin.flush()
        return self._heard()

    def _heard(self) -> dict[str, Any]:
        assert self.stdout is not None
        if line := self.stdout.readline():
            found: dict[str, Any] = json.loads(line)
            return found
        code = self.wait()
        lines = os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace").strip().splitlines()
        raise EngineError(f"{self._name}: exited with code {code}: {lines[-1] if lines else ''}")

    def close(self) -> None:
        """Idempotent."""
        self.send_signal(self._ending)
        with suppress(subprocess.TimeoutExpired):
            self.wait(END)
        self.kill()
        super().__exit__(None, None, None)  # closes its pipes
        self._log.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def processes(self) -> dict[str, int]:
        """Ids of its processes by role, as `api`, `target`, `draft 0`."""
        found, tree = {"api": self.pid}, children(self.pid)
        while tree:
            pid = tree.pop()
            tree += children(pid)
            title = _text(Path(f"/proc/{pid}/cmdline")).partition("\0")[0]
            if title.startswith(TITLE):
                found[title.removeprefix(TITLE)] = pid
        return found


def start_server(config: EngineConfig, options: Sequence[str] = ()) -> Program:
    """`pilotfish serve` on a free port of this host; `told["url"]` once it serves."""
    command = [sys.executable, "-m", "pilotfish", "serve", "--json", "--port=0", *server_options(config), *options]
    return Program(WorkerSpec("server", command), signal.SIGTERM)


def server_options(config: EngineConfig) -> list[str]:
    """Options of `pilotfish serve` that make it run `config`."""
    given = {name: getattr(config, name) for name in SERVER_OPTIONS}
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]


# -- draft pools


@contextmanager
def pools_beside(
    config: EngineConfig, pools: int = 1, options: Sequence[str] = ()
) -> Iterator[tuple[list[Program], EngineConfig]]:
    """So many pools on cores of their own, and an engine's configuration that leaves those alone."""
    placement = split_cores(frozenset(os.sched_getaffinity(0)), "", "", pools)
    beside = replace(config, cores=",".join(map(str, sorted(placement.target))), threads=0)
    with ExitStack() as stack:
        yield [stack.enter_context(start_pool(config, cores, options)) for cores in placement.workers], beside


def start_pool(config: EngineConfig, cores: frozenset[int] = frozenset(), options: Sequence[str] = ()) -> Program:
    """A pool of the draft of `config` on a free port of this host, loading; `told["endpoint"]` once it serves."""
    command = [*worker_command("draft", config, f"tcp://{HOST}:0", "draft pool"), "--json", *options]
    return Program(WorkerSpec("draft pool", command, cores))


def start_proxy(pool: Program, round_trip: float, mbit: float) -> Program:
    """A network before a pool, on its cores, with a round trip in milliseconds; `told["endpoint"]` once it listens."""
    arguments = (pool.told["endpoint"].removeprefix("tcp://"), str(mbit), str(round_trip))
    command = [sys.executable, "-m", "pilotfish.bench.proxy", *arguments]
    return Program(WorkerSpec("proxy", command, frozenset(os.sched_getaffinity(pool.pid))))


@contextmanager
def attached(engine: Engine, endpoint: str) -> Iterator[RemoteDrafts]:
    """An idle engine's connection to a pool; its drafter is for `engine.use`."""
    config = replace(engine.config, mode="async", draft_pool=(endpoint,))
    with closing(RemoteDrafts(config)) as remote:
        remote.connect(engine.tokenizer, engine.model.config.vocab_size)
        yield remote


# -- processes


def children(pid: int) -> list[int]:
    """Ids of the child processes of all its threads."""
    return [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in _text(path).split()]


def memory_bytes(pid: int) -> int:
    """Resident set size; 0 for a process that has ended."""
    words = _text(Path(f"/proc/{pid}/statm")).split()
    return int(words[1]) * PAGE if words else 0


def cpu_seconds(pid: int) -> float:
    """CPU time of all its threads since it began; 0 for a process that has ended."""
    words = _text(Path(f"/proc/{pid}/stat")).rpartition(") ")[2].split()
    return (int(words[11]) + int(words[12])) / TICK if words else 0.0


def machine_seconds() -> float:
    """CPU time of all processes since the machine started."""
    return sum(map(int, _text(Path("/proc/stat")).split()[1:4])) / TICK


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # the process or thread has ended
        return ""
