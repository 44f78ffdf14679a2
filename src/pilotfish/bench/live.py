"""`pilotfish serve` as a process of its own, and what its processes take."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType

from pilotfish.config import EngineConfig
from pilotfish.engine.process import WorkerSpec, worker_environment
from pilotfish.errors import EngineError

#: Seconds that a server may take to end before it is killed.
END = 30.0
PAGE = os.sysconf("SC_PAGE_SIZE")
TICK = os.sysconf("SC_CLK_TCK")
#: What every process of a server is called in `ps`.
TITLE = "pilotfish: "
_MODELS = ("target", "draft")
_SETTINGS = (
    *("mode", "drafter", "nodes", "levels", "width", "leaves", "budget", "dtype", "quantization"),
    *("threads", "cores", "kv_slots", "max_requests", "pace"),
)


class LiveServer:
    """A server of `config` on a free port of this host; its log goes to a file. It ends with the `with`."""

    def __init__(self, config: EngineConfig, options: Sequence[str] = ()) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the server runs
        command = [sys.executable, "-m", "pilotfish", "serve", "--json", "--port=0", *arguments(config), *options]
        environment = worker_environment(WorkerSpec("server", command))
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, env=environment)

    @cached_property
    def url(self) -> str:
        """Waits until requests can be served; EngineError where the server ends instead."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"server: exited with code {self._process.wait()}: {self._last_words()}")
        return str(json.loads(line)["url"])

    def _last_words(self) -> str:
        lines = os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def metrics(self) -> dict[str, float]:
        """Each metric's sum over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as response:
            return sums(response.read().decode())

    def processes(self) -> dict[str, int]:
        """Process ids by role, as `api`, `target`, `draft 0`."""
        found, tree = {"api": self._process.pid}, children(self._process.pid)
        while tree:
            pid = tree.pop()
            tree += children(pid)
            title = _title(pid)
            if title.startswith(TITLE):
                found[title.removeprefix(TITLE)] = pid
        return found

    def close(self) -> None:
        """Idempotent."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def arguments(config: EngineConfig) -> list[str]:
    """Options of `pilotfish serve` that make it run `config`."""
    models = [f"--{name}={getattr(config, name)}" for name in _MODELS if getattr(config, name) is not None]
    return models + [f"--{name.replace('_', '-')}={getattr(config, name)}" for name in _SETTINGS]


def sums(text: str) -> dict[str, float]:
    """Prometheus' text format, labels summed over."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            sample, _, value = line.rpartition(" ")
            name = sample.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


def children(pid: int) -> list[int]:
    """Of all its threads."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        found += [int(word) for word in _text(path).split()]
    return found


def memory_bytes(pid: int) -> int:
    """Resident set size; 0 for a process that has ended."""
    words = _text(Path(f"/proc/{pid}/statm")).split()
    return int(words[1]) * PAGE if words else 0


def cpu_seconds(pid: int) -> float:
    """Of all its threads since it began; 0 for a process that has ended."""
    words = _text(Path(f"/proc/{pid}/stat")).rpartition(") ")[2].split()
    return (int(words[11]) + int(words[12])) / TICK if words else 0.0


def _title(pid: int) -> str:
    return _text(Path(f"/proc/{pid}/cmdline")).partition("\0")[0]


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # the process or thread has ended
        return ""
