"""Real servers for tests that talk to them over HTTP; here as a process, in `inline_server` as threads."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

#: Seconds that a server may take until it is ready, and to end.
START, END = 180.0, 60.0


class HttpServer:
    """Where a server is, and what it answers."""

    def __init__(self, url: str, written: Callable[[], str] = str) -> None:
        self.url, self._written = url, written

    @property
    def log(self) -> str:
        """What it has logged."""
        return self._written()

    def get(self, path: str) -> tuple[int, Any]:
        """Status and body, JSON where it is some."""
        return self._answer(urllib.request.Request(self.url + path))

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        """The same; a body of bytes goes out as it is."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json", **headers})
        return self._answer(request)

    def metric(self, *names: str) -> float:
        """The sum of the metrics' samples; names as in the text format, without labels."""
        lines = self.get("/metrics")[1].splitlines()
        found = [[line for line in lines if line.startswith((f"{name}{{", f"{name} "))] for name in names]
        assert all(found), f"one of {names} is no metric"
        return sum(float(line.rpartition(" ")[2]) for samples in found for line in samples)

    @staticmethod
    def _answer(request: urllib.request.Request) -> tuple[int, Any]:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, _body(response.read())
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _body(error.read())


class LiveServer(HttpServer):
    """`pilotfish serve` over tiny models, on a free port. Options as of the command line, `max_n=3` for `--max-n 3`;
    True is a flag, a list an option that repeats.

    >>> with LiveServer(target=llama, mode="off") as server:
    ...     server.get("/ready")
    """

    def __init__(self, target: Path, **options: Any) -> None:
        super().__init__("")
        given = {"target": target, "port": 0, "dtype": "float32", "threads": 1, "kv_slots": 4096, **options}
        arguments = [argument for name, value in given.items() for argument in _arguments(name, value)]
        self._log = os.memfd_create("log")  # readable after the server has ended
        weakref.finalize(self, os.close, self._log)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pilotfish", "serve", "--json", *arguments],
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1"},
        )

    def __enter__(self) -> LiveServer:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], START)
        line = self.process.stdout.readline() if readable else b""
        if not line:
            self.kill()
            raise AssertionError(f"the server did not start: {self.log}")
        self.url = json.loads(line)["url"]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(END)
        finally:
            self.kill()
        assert "KV slots leak" not in self.log

    def kill(self) -> None:
        """End it at once; harmless where it has ended."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def log(self) -> str:
        return os.pread(self._log, 1 << 24, 0).decode(errors="replace")

    def pids(self, title: str) -> list[int]:
        """Processes below it with this title, as `target` or `draft 0`."""
        tree, found = [self.process.pid], []
        while tree:
            parent = tree.pop()
            threads = Path(f"/proc/{parent}/task").glob("*/children")
            children = [pid for thread in threads for pid in _words(thread)]
            tree += children
            found += [pid for pid in children if _title(pid) == f"pilotfish: {title}"]
        return found


def _arguments(name: str, value: Any) -> list[str]:
    option = f"--{name.replace('_', '-')}"
    if isinstance(value, list):
        return [f"{option}={one}" for one in value]
    return [option] if value is True else [f"{option}={value}"]


def _words(path: Path) -> list[int]:
    try:
        return [int(word) for word in path.read_text().split()]
    except OSError:  # the thread has ended
        return []


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode(errors="replace")
    except OSError:
        return ""


def _body(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")
