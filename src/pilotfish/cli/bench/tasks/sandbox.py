"""Runs programs that a model wrote. `sandboxed` says what they give up first; here are their limits and their end.

A program passes where it runs to its end: only then the process writes a nonce to a pipe. A program that leaves early,
whatever its exit code, has not passed. One that sets out to cheat can: it shares a process with its tests."""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pilotfish.errors import EngineError
from pilotfish.printable import one_line

CHILD = Path(__file__).with_name("sandboxed.py")
#: Characters of a reason, and bytes of the output's end that it is sought in.
MAX_REASON, MAX_TAIL = 160, 4096
SIGNALS = {one.value: one.name for one in signal.Signals}


@dataclass(frozen=True)
class Limits:
    seconds: float = 10.0  # of the clock
    cpu_seconds: int = 5
    memory_bytes: int = 512 << 20  # of address space
    file_bytes: int = 1 << 20  # of each file, its output among them
    open_files: int = 64

    def of_process(self) -> dict[str, int]:
        """By their names in the module resource."""
        return {
            "RLIMIT_CPU": self.cpu_seconds,
            "RLIMIT_AS": self.memory_bytes,
            "RLIMIT_FSIZE": self.file_bytes,
            "RLIMIT_NOFILE": self.open_files,
            "RLIMIT_CORE": 0,
        }


class Sandbox:
    """EngineError where programs cannot be confined here."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.confines_files = False  # whether they are confined to the working directory
        if reason := self.run(""):
            raise EngineError(f"sandbox: no program can be run in it: {reason}")

    def run(self, source: str) -> str:
        """Run a program to its end, in an empty directory of its own. Nothing of it is left then. Returns why it has
        not passed, one line, which the program may have written; "" if it has."""
        nonce = secrets.token_hex(16).encode()
        reading, writing = os.pipe()
        with (
            tempfile.TemporaryDirectory(prefix="pilotfish-program-") as directory,
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as output,
            os.fdopen(reading, "rb", buffering=0) as verdict,
        ):
            given.write(nonce + b"\n" + source.encode(errors="surrogatepass"))
            given.seek(0)
            with os.fdopen(writing, "wb") as end:
                process = self._start(directory, given, output, end.fileno())
            code = _wait(process, self.limits.seconds)
            os.set_blocking(reading, False)
            begun, _, told = (verdict.read(256) or b"").partition(b"\n")
            return self._outcome(code, begun, told == nonce, output)

    def _start(self, directory: str, given: IO[bytes], output: IO[bytes], verdict: int) -> subprocess.Popen[bytes]:
        limits = json.dumps(self.limits.of_process())
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(CHILD), limits, str(verdict)],
            cwd=directory,
            env={"HOME": directory, "TMPDIR": directory, "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"},
            stdin=given,
            stdout=output,
            stderr=output,
            pass_fds=(verdict,),
            start_new_session=True,
        )

    def _outcome(self, code: int | None, begun: bytes, ended: bool, output: IO[bytes]) -> str:
        size, last = _end_of(output)
        if not begun:
            raise EngineError(f"sandbox: a program cannot be confined here: {last or f'exit code {code}'}")
        self.confines_files = json.loads(begun)["files"]
        return "" if ended else self._reason(code, size, last)

    def _reason(self, code: int | None, size: int, last: str) -> str:
        if code is None:
            return f"it took more than {self.limits.seconds:g} s"
        if size >= self.limits.file_bytes:
            return f"it wrote more than {self.limits.file_bytes} bytes"
        if code < 0:
            return f"killed by {SIGNALS.get(-code, -code)}"
        return last if code and last else f"it ended itself with exit code {code}"


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """The exit code; None where the process took too long. It has no children: it ends alone."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        process.kill()
        process.wait()


def _end_of(output: IO[bytes]) -> tuple[int, str]:
    """Its size, and its last line that is not empty."""
    size = output.seek(0, os.SEEK_END)
    output.seek(max(size - MAX_TAIL, 0))
    lines = [line for line in output.read(MAX_TAIL).decode(errors="replace").splitlines() if line.strip()]
    return size, one_line(lines[-1])[:MAX_REASON] if lines else ""
