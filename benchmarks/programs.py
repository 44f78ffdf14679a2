"""Programs that benches start, and memory of processes."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from pilotfish.config.engine import EngineConfig
from pilotfish.engine.processes.process import WorkerSpec, on_cores, worker_environment
from pilotfish.errors import EngineError

#: Seconds that a program may take to end before it is killed.
END = 30.0
PAGE = os.sysconf("SC_PAGE_SIZE")
#: What every process of a server is called in `ps`.
TITLE = "pilotfish: "
SERVER_OPTIONS = (
    *("target", "draft", "mode", "drafter", "nodes", "levels", "width", "leaves", "budget", "dtype", "quantization"),
    *("threads", "cores", "kv_slots", "kv_dtype", "kv_host_memory", "kv_disk", "kv_disk_size", "max_requests", "pace"),
)


class Program(subprocess.Popen[bytes]):
    """A process that tells, in JSON on the first line of its stdout, that it is ready. It ends with the `with`, and
    with the thread that has started it; its stderr goes to a file."""

    def __init__(self, spec: WorkerSpec, ending: signal.Signals = signal.SIGKILL) -> None:
        """`ending` is the signal that ends it."""
        self._name, self._ending = spec.name, ending
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the program runs
        with on_cores(spec.cores):
            super().__init__(
                list(spec.command),
                env=worker_environment(spec),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._log,
                process_group=0,  # not a session: Linux shares cores between sessions first, then between threads
            )

    @cached_property
    def told(self) -> dict[str, Any]:
        """The first line. Waits for it; EngineError where the program ends instead."""
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


# -- processes


def children(pid: int) -> list[int]:
    """Ids of the child processes of all its threads."""
    return [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in _text(path).split()]


def memory_bytes(pid: int) -> int:
    """Resident set size; 0 for a process that has ended."""
    words = _text(Path(f"/proc/{pid}/statm")).split()
    return int(words[1]) * PAGE if words else 0


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # the process or thread has ended
        return ""
