"""Programs in the sandbox: only one that reaches its end passes, and none does anything to others."""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from sizes import sized

from pilotfish.cli.bench.tasks import sandbox
from pilotfish.cli.bench.tasks.sandbox import CHILD, Limits, Sandbox
from pilotfish.cli.bench.tasks.sandboxed import ARCHITECTURES, CLONE, CLONE3, DENIED, FOR_ITSELF
from pilotfish.errors import EngineError


@pytest.fixture(scope="module")
def box() -> Sandbox:
    """Patient: the machine may be busy."""
    return Sandbox(replace(Limits(), seconds=120.0))


@pytest.fixture(scope="module")
def small() -> Sandbox:
    """For programs that go on until they have used their second, their memory, or written their share."""
    return Sandbox(replace(Limits(), seconds=120.0, cpu_seconds=1, memory_bytes=192 << 20, file_bytes=1 << 16))


def reason(box: Sandbox, source: str) -> str:
    """Why a program has not passed; nothing of it is left."""
    reason = box.run(source)
    assert reason and "\n" not in reason and running() == []
    return reason


def running() -> list[str]:
    """Sandboxed processes that there are."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_text(errors="replace")
        except OSError:  # it has ended
            continue
        found += [path.parts[2]] if str(CHILD) in line else []
    return found


def all_fail(box: Sandbox, head: str, lines: Sequence[str], error: str) -> None:
    """One program tries each of the lines, and says which did not fail with an error that matches."""
    source = f"""{head}
import re
worked = []
for line in {[*lines]!r}:
    try:
        exec(line)
    except Exception as error:
        worked += [] if re.search({error!r}, repr(error)) else [line, error]
    else:
        worked += [line]
raise ValueError(worked)"""
    assert reason(box, source) == "ValueError: []"


@pytest.mark.parametrize(
    "source",
    [
        "",
        "import os\nassert os.listdir() == [] and os.path.samefile(os.environ['HOME'], '.') and len(os.environ) < 8\n"
        "assert 1 + 1 == 2 and input.__name__ == 'input'\nprint('x' * 1000)\n"
        "open('note', 'w').write('x')\nassert open('note').read() == 'x'\nopen('/dev/null', 'w').write('x')\n"
        "assert not os.isatty(0) and os.read(0, 1) == b''",
        "import asyncio, collections, datetime, decimal, hashlib, json, math, multiprocessing, random, re, ssl, typing",
        "import threading, time\nt = threading.Thread(target=print)\nt.start()\nt.join()\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()",  # is not waited for
        "import atexit, os\natexit.register(os._exit, 1)",  # has no say any more
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass A:\n    x: int\nA(1)\n"
        "if __name__ == '__main__':\n    raise SystemExit(1)",  # it is no script
    ],
)
def test_a_program_that_reaches_its_end_passes(box: Sandbox, source: str) -> None:
    assert box.run(source) == ""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("assert 1 + 1 == 3", "AssertionError"),
        ("assert x", "NameError: name 'x' is not defined"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("x = '\0'", "SyntaxError|ValueError"),
        ("import sys\nsys.exit(0)", "it ended itself with exit code 0"),
        ("import sys\nsys.exit('passed')", "^passed$"),
        ("import os\nos.write(1, b'passed')\nos._exit(0)", "it ended itself with exit code 0"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt|SIGINT"),
        ("import os\nos.kill(os.getpid(), 36)", "killed by 36"),
        ("import os\nos.abort()", "killed by SIGABRT"),
        ("import ctypes\nctypes.string_at(0)", "killed by SIGSEGV"),
        ("def f():\n    f()\nf()", "RecursionError"),
        ("x = [0] * 10**9", "MemoryError"),
        ("input()", "EOFError"),
        ("raise ValueError('\\x1b]0;x\\n\\u202e')", r"^\\u202e$"),
        ("import numpy", "ModuleNotFoundError"),
        ("import pilotfish", "ModuleNotFoundError"),
    ],
)
def test_any_other_end_is_a_failure(box: Sandbox, source: str, expected: str) -> None:
    assert re.search(expected, reason(box, source))


STUBBORN = """import signal
for s in (signal.SIGTERM, signal.SIGXCPU, signal.SIGINT, signal.SIGHUP):
    signal.signal(s, signal.SIG_IGN)
while True:
    pass"""
ENDLESS = {"while True:\n    pass": "killed by SIGXCPU", STUBBORN: "killed by SIGKILL"}


@pytest.mark.parametrize("source", sized([STUBBORN], [*ENDLESS]))
def test_programs_that_never_end(small: Sandbox, source: str) -> None:
    assert reason(small, source) == ENDLESS[source]


def test_what_sleeps_is_ended_too() -> None:
    assert reason(Sandbox(replace(Limits(), seconds=2.0)), "import time\ntime.sleep(600)") == "it took more than 2 s"


def test_a_flood_ends(small: Sandbox) -> None:
    for source in ("while True:\n    print('x' * 1000)", "import os\nwhile True:\n    os.write(2, b'x' * 1000)"):
        assert reason(small, source) == "it wrote more than 65536 bytes"
    assert "File too large" in reason(small, "with open('note', 'w') as f:\n    f.write('x' * 70000)")
    assert "MemoryError" in reason(small, "x = []\nwhile True:\n    x.append(bytearray(1 << 20))")


#: Ways to start a process, which leave one if they work.
STARTS = [
    "os.fork() or time.sleep(60)",
    "while True:\n    os.fork()",
    "if not os.fork():\n    os.setsid()\n    os.fork() or time.sleep(60)",
    "subprocess.Popen(['/bin/sleep', '60'], start_new_session=True)",
    "os.posix_spawn('/bin/sleep', ['sleep', '60'], {})",
    "multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,)).start()",
    "os.execv('/bin/sh', ['sh'])",
    "r = libc.syscall(CLONE, 17, 0, 0, 0, 0)\nr or time.sleep(60)\nassert r > 0, ctypes.get_errno()",
    "a = bytes(64)\nr = libc.syscall(435, a, 64)\nr or time.sleep(60)\nassert r > 0, ctypes.get_errno()",
]


def test_no_process_is_started(box: Sandbox) -> None:
    head = "import ctypes, multiprocessing, os, subprocess, time\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    number = CLONE[ARCHITECTURES[platform.machine()][0]]
    all_fail(box, f"{head}CLONE = {number}", STARTS, r"^PermissionError|^AssertionError\((1|38)\)$")


def test_no_network(box: Sandbox) -> None:
    calls = ["socket.socket()", "socket.create_connection(('127.0.0.1', 1))", "socket.socket(socket.AF_UNIX)"]
    calls += ["urllib.request.urlopen('http://127.0.0.1:1')"]
    all_fail(box, "import socket, urllib.request", calls, "Operation not permitted")


def test_other_processes_are_out_of_reach(box: Sandbox) -> None:
    calls = [f"os.kill({os.getpid()}, 0)", "os.kill(os.getppid(), 0)", "os.kill(-1, 0)"]
    calls += ["os.setpriority(os.PRIO_PROCESS, 0, 5)"]
    calls += [f"resource.prlimit({os.getpid()}, resource.RLIMIT_CORE, (0, 0))"]
    all_fail(box, "import os, resource", calls, "^PermissionError")
    all_fail(box, "import resource", ["resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))"], "^ValueError")


def test_files_of_others_stay_as_they_are(box: Sandbox, tmp_path: Path) -> None:
    if not box.confines_files:
        pytest.skip("this kernel has no Landlock: docs/security.md says what is not guarded then")
    kept = tmp_path / "kept"
    kept.write_text("as it was")
    kept.chmod(0o644)
    before = kept.stat().st_mode, kept.stat().st_mtime_ns
    calls = ["open(kept, 'w')", "open(kept, 'a')", "open(kept)", "open(new, 'w')", "os.remove(kept)", "os.mkdir(new)"]
    calls += ["os.rename(kept, 'mine')", "os.link(kept, 'mine')", "os.truncate(kept, 0)", "os.symlink('x', new)"]
    calls += ["os.symlink(kept, 'mine')\nopen('mine', 'w')", "os.chmod(kept, 0o777)", "os.utime(kept, (0, 0))"]
    calls += ["os.setxattr(kept, 'user.x', b'x')", "os.listdir('/proc')", "open('/etc/passwd')"]
    head = f"import os\nkept, new = {str(kept)!r}, {str(tmp_path / 'new')!r}"
    all_fail(box, head, calls, "^PermissionError|^OSError")
    assert kept.read_text() == "as it was" and list(tmp_path.iterdir()) == [kept]
    assert (kept.stat().st_mode, kept.stat().st_mtime_ns) == before


def test_nothing_is_left(box: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    hidden = "import os\nos.makedirs('a/b', mode=0)\nopen('c', 'w').write('x')\nraise ValueError"
    assert reason(box, hidden) == "ValueError" or os.geteuid() != 0
    assert list(tmp_path.iterdir()) == [] and len(list(Path("/proc/self/fd").iterdir())) == descriptors


def changed(tmp_path: Path, before: str, after: str) -> Path:
    """The sandboxed process, as on another machine."""
    child, text = tmp_path / "sandboxed.py", CHILD.read_text()
    assert text.count(before) == 1
    child.write_text(text.replace(before, after))
    shutil.copy(CHILD.with_suffix(".toml"), tmp_path)
    return child


def test_without_landlock_all_else_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "CHILD", changed(tmp_path, "if version < 1:", "if version < 1000:"))
    box, path = Sandbox(), tmp_path / "note"
    assert not box.confines_files and box.run(f"open({str(path)!r}, 'w').write('x')") == ""
    calls = ["os.fork()", "socket.socket()", "os.chmod('/', 0o755)", f"os.kill({os.getppid()}, 0)"]
    all_fail(box, "import os, socket", calls, "^PermissionError")


def test_a_sandbox_that_cannot_confine_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "CHILD", changed(tmp_path, "ARCHITECTURES = {", "ARCHITECTURES = {} and {"))
    with pytest.raises(EngineError, match=r"^sandbox: a program cannot be confined here: OSError: .* no system calls"):
        Sandbox()


@pytest.mark.parametrize("machine", ARCHITECTURES)
def test_the_numbers_of_calls_are_the_kernels(machine: str) -> None:
    compiler = "c++" if machine == platform.machine() else f"{machine}-linux-gnu-g++"
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not there")
    command = [compiler, "-E", "-dM", "-x", "c", "-include", "asm/unistd.h", "/dev/null"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    known = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+) (\d+)$", text, re.MULTILINE)}
    place = ARCHITECTURES[machine][0]
    for name, numbers in {**DENIED, **FOR_ITSELF, "clone": CLONE, "clone3": CLONE3}.items():
        assert [known.get(name)] == list(numbers[place : place + 1] or [None]), name
