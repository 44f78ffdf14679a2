"""Workers in processes of their own, with small scripts in their place: each starts in tens of milliseconds."""

import gc
import io
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from support import eventually

from pilotfish.engine.processes import launch
from pilotfish.engine.processes.launch import Supervisor, WorkerState, wait_until
from pilotfish.engine.processes.process import LOG_FORMAT, PARENT, Ending, WorkerSpec
from pilotfish.errors import EngineError

#: Seconds after which a test gives up.
LIMIT = 20.0
#: Seconds before a worker is started again, at most, and that it has to end.
LONGEST, GRACE = 0.05, 5.0
SLEEP = "import time; time.sleep(600)"
STUBBORN = f"""
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open(sys.argv[1], "w").close()
{SLEEP}"""
#: A parent of a worker that dies with it: `report` prints the worker's process id and the directory.
PARENT_SCRIPT = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs are started with it ignored
from pilotfish.engine.processes.launch import Supervisor, wait_until
from pilotfish.engine.processes.process import WorkerSpec
worker = '''
import signal, sys, time
from pilotfish.engine.processes.process import die_with_parent
die_with_parent()
def note(number, _):
    open(sys.argv[1] + ".signal", "a").write(signal.Signals(number).name)
    sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
open(sys.argv[1], "w").close()
time.sleep(600)
'''
supervisor = Supervisor()
supervisor.start([WorkerSpec("draft 0", [sys.executable, "-c", worker, sys.argv[1]])])
wait_until(lambda: os.path.exists(sys.argv[1]) and supervisor.poll()[0].pid is not None, lambda: None, 20, "draft 0")
def report():
    print(supervisor.poll()[0].pid, supervisor.directory, flush=True)
"""


def python(code: str, *arguments: str, name: str = "draft 0", **fields: object) -> WorkerSpec:
    return WorkerSpec(name, [sys.executable, "-c", code, *arguments], **fields)  # type: ignore[arg-type]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def problems(supervisor: Supervisor) -> tuple[str, ...]:
    """Why workers are down, a line for each."""
    return tuple(state.problem for state in supervisor.poll() if state.problem)


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    monkeypatch.setattr(launch, "FIRST_DELAY", 0.02)
    monkeypatch.setattr(launch, "LONGEST_DELAY", LONGEST)
    with closing(Supervisor(GRACE)) as made:
        yield made


def running_pid(supervisor: Supervisor) -> int:
    eventually(lambda: supervisor.poll()[0].status == "running")
    pid = supervisor.poll()[0].pid
    assert pid is not None and alive(pid)
    return pid


# -- start, restart, failure


def test_workers_run_until_the_supervisor_is_closed(supervisor: Supervisor) -> None:
    supervisor.start([python(SLEEP), python(SLEEP, name="draft 1")])
    eventually(lambda: all(state.status == "running" for state in supervisor.poll()))
    assert [state.name for state in supervisor.poll()] == ["draft 0", "draft 1"] and problems(supervisor) == ()
    pids = [state.pid for state in supervisor.poll()]
    supervisor.close()
    assert not any(alive(pid) for pid in pids if pid) and not supervisor.directory.exists()
    assert [(state.status, state.pid) for state in supervisor.poll()] == [("stopped", None)] * 2


def test_bad_input_is_not_tried_again(supervisor: Supervisor, capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print('out'); print('first\\ndraft: no such directory\\n', file=sys.stderr); sys.exit(2)"
    supervisor.start([python(code)])
    eventually(lambda: supervisor.poll()[0].status == "failed")
    reason = "draft 0: exited with code 2: draft: no such directory"
    assert problems(supervisor) == (reason,) and supervisor.poll()[0].restarts == 0
    out, err = capfd.readouterr()
    assert out == "" and "out\n" in err and "first\ndraft: no such directory\n" in err
    with pytest.raises(EngineError) as caught:
        wait_until(lambda: False, lambda: problems(supervisor)[0], LIMIT, "draft workers")
    assert str(caught.value) == reason
    time.sleep(5 * LONGEST)
    assert supervisor.poll()[0].status == "failed" and supervisor.poll()[0].restarts == 0
    supervisor.close()
    assert problems(supervisor) == (reason,)


def test_what_a_worker_writes_is_passed_on_escaped(supervisor: Supervisor, capfd: pytest.CaptureFixture[str]) -> None:
    """It may quote what others sent: with ESC, BEL, CR, C1, bytes that are no text."""
    code = r"""
import sys
sys.stderr.buffer.write(b"plain\tna\xc3\xafve\r\n\x1b[2Jcleared\x07 \xc2\x9b31m \xff\n50 %\r100 %\r\n")
sys.stderr.buffer.write(b"\x1b]0;owned\x07end")
sys.exit(2)"""
    supervisor.start([python(code)])
    eventually(lambda: supervisor.poll()[0].status == "failed")
    assert problems(supervisor) == (r"draft 0: exited with code 2: \x1b]0;owned\x07end",)
    err = capfd.readouterr().err
    assert "plain\tnaïve\n\\x1b[2Jcleared\\x07 \\x9b31m \ufffd\n50 %\n100 %\n\\x1b]0;owned\\x07end" in err
    assert not set(err) & set("\x1b\x07\r\x9b")


def test_the_last_line_is_waited_for(supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may still be in the pipe when the process has ended."""
    slow = io.StringIO()
    monkeypatch.setattr(slow, "write", lambda _: time.sleep(0.3))
    monkeypatch.setattr(sys, "stderr", slow)
    supervisor.start([python("import sys; print('first\\nlast', file=sys.stderr); sys.exit(2)")])
    eventually(lambda: supervisor.poll()[0].status == "failed")
    assert problems(supervisor) == ("draft 0: exited with code 2: last",)


@pytest.mark.parametrize(
    ("code", "last_line", "says"),
    [
        (1, "no", "exited with code 1: no"),
        (0, "no", "exited with code 0"),
        (1, '{"message": "a record"}', "exited with code 1"),
        (-signal.SIGABRT, "a product of nothing", "was ended by signal 6 (Aborted): a product of nothing"),
        (-signal.SIGTERM, "no", "was ended by signal 15 (Terminated)"),
    ],
)
def test_what_an_ending_says(code: int, last_line: str, says: str) -> None:
    assert str(Ending(code, last_line)) == says


def test_a_worker_that_is_killed_comes_back(supervisor: Supervisor) -> None:
    supervisor.start([python(SLEEP), python(SLEEP, name="draft 1")])
    first = running_pid(supervisor)
    eventually(lambda: supervisor.poll()[1].status == "running")
    other = supervisor.poll()[1].pid
    os.kill(first, signal.SIGKILL)
    eventually(lambda: supervisor.poll()[0].restarts == 1)
    assert running_pid(supervisor) != first
    assert supervisor.poll()[0].reason == "was ended by signal 9 (Killed)"
    assert supervisor.poll()[1].pid == other and supervisor.poll()[1].restarts == 0


def test_what_a_crashed_worker_had_started_is_gone_too(supervisor: Supervisor, tmp_path: Path) -> None:
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); open(sys.argv[1], 'w').write(f'{p.pid} ')"
    supervisor.start([python(f"{code}; sys.exit(2)", str(tmp_path / "pid"))])
    eventually(lambda: supervisor.poll()[0].status == "failed")
    eventually(lambda: not alive(int((tmp_path / "pid").read_text())))


def test_a_command_that_does_not_exist_is_a_problem(supervisor: Supervisor) -> None:
    supervisor.start([WorkerSpec("draft 0", ["/no/such/command"])])
    eventually(lambda: bool(problems(supervisor)))
    assert re.fullmatch(r"draft 0: cannot be started: .*/no/such/command.*", problems(supervisor)[0])
    eventually(lambda: supervisor.poll()[0].restarts >= 1)


def test_delays_double_up_to_the_longest() -> None:
    delays = [launch.delay_after(crashes) for crashes in (1, 2, 3, 4, 5, 6, 7, 100_000)]
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


class FakeProcess:
    """Fails after the next of `runs` seconds."""

    pid, now, runs = 1, 1000.0, [0.0, 29.0, 29.0, 31.0, 1.0]

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec

    def wait(self) -> None:
        type(self).now += self.runs.pop(0)

    def end(self) -> Ending:
        return Ending(1, "")


def test_a_healthy_run_begins_the_delays_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "WorkerProcess", FakeProcess)
    monkeypatch.setattr(launch, "time", SimpleNamespace(monotonic=lambda: FakeProcess.now))
    states: list[WorkerState] = []
    waits: list[float] = []

    def pause(seconds: float) -> None:
        waits.append(seconds)
        if not FakeProcess.runs:
            worker.terminate()

    worker = launch._Worker(python(SLEEP), states.append)
    monkeypatch.setattr(worker, "_pause", pause)
    worker.run()
    assert waits == [0.1, 0.2, 0.4, 0.1, 0.2] and worker.state.restarts == 4
    assert [state.status for state in states] == ["running", "restarting"] * 5 + ["stopped"]


# -- the end


@pytest.mark.parametrize("stopped", [False, True])
def test_a_worker_that_does_not_end_is_killed(tmp_path: Path, stopped: bool) -> None:
    with closing(Supervisor(grace=0.1)) as supervisor:
        supervisor.start([python(STUBBORN, str(tmp_path / "up"))])
        pid = running_pid(supervisor)
        eventually((tmp_path / "up").exists)
        if stopped:
            os.kill(pid, signal.SIGSTOP)
    assert not alive(pid)


def test_an_interrupt_of_its_end_kills_a_worker_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    join = launch._Worker.join

    def interrupted(worker: launch._Worker, timeout: float | None = None) -> None:
        if timeout is not None:
            raise KeyboardInterrupt
        join(worker)

    supervisor = Supervisor(grace=600.0)
    supervisor.start([python(STUBBORN, str(tmp_path / "up"))])
    pid = running_pid(supervisor)
    eventually((tmp_path / "up").exists)
    monkeypatch.setattr(launch._Worker, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        supervisor.close()
    assert not alive(pid) and not supervisor.directory.exists()


@pytest.mark.parametrize("broken", ["terminate", "join"])
def test_what_interrupts_have_left_is_ended_by_the_next_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Each of the first two calls of `close` is interrupted wherever it terminates, or waits."""
    supervisor = Supervisor(grace=0.1)
    supervisor.start([python(STUBBORN, str(tmp_path / name), name=name) for name in ("one", "two")])
    for name in ("one", "two"):
        eventually((tmp_path / name).exists)
    pids = [state.pid or 0 for state in supervisor.poll()]
    assert all(map(alive, pids))
    for _ in range(2):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(launch._Worker, broken, Mock(side_effect=KeyboardInterrupt))
            supervisor.close()
    with pytest.raises(EngineError, match="closed"):
        supervisor.start([python(SLEEP)])
    supervisor.close()
    assert not any(map(alive, pids)) and not supervisor.directory.exists()
    assert [state.status for state in supervisor.poll()] == ["stopped", "stopped"]


def test_a_worker_has_time_to_end_in_order(tmp_path: Path) -> None:
    code = """
import pathlib, signal, sys, time
def end(*_):
    time.sleep(0.1)
    pathlib.Path(sys.argv[1], "ended").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
pathlib.Path(sys.argv[1], "up").touch()
time.sleep(600)
"""
    with closing(Supervisor(GRACE)) as supervisor:
        supervisor.start([python(code, str(tmp_path))])
        eventually((tmp_path / "up").exists)
    assert (tmp_path / "ended").exists() and supervisor.poll()[0].status == "stopped"


def test_a_supervisor_that_is_forgotten_leaves_nothing() -> None:
    supervisor = Supervisor(GRACE)
    supervisor.start([python(SLEEP)])
    pid, directory = running_pid(supervisor), supervisor.directory
    del supervisor
    gc.collect()
    assert not alive(pid) and not directory.exists()


class Family:
    """A process with a Supervisor in it and a worker below."""

    def __init__(self, directory: Path, then: str) -> None:
        self.mark = directory / "up"
        command = [sys.executable, "-c", PARENT_SCRIPT + then, str(self.mark)]
        self.parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.parent.stdout is not None
        pid, sockets = self.parent.stdout.readline().split()
        self.worker, self.sockets = int(pid), Path(sockets)

    def ended_by(self) -> str:
        """The signal that the worker got, once parent and worker are gone."""
        assert self.parent.stdout is not None
        with self.parent.stdout:
            self.parent.wait(LIMIT)
        eventually(lambda: not alive(self.worker))
        noted = self.mark.with_suffix(".signal")
        return noted.read_text() if noted.exists() else ""


def test_a_parent_that_just_ends_shuts_its_workers_down(tmp_path: Path) -> None:
    family = Family(tmp_path, "report()")
    assert family.ended_by() == "SIGTERM" and not family.sockets.exists()


def test_ctrl_c_reaches_the_parent_only(tmp_path: Path) -> None:
    family = Family(tmp_path, "try:\n  report()\n  time.sleep(600)\nexcept KeyboardInterrupt:\n  supervisor.close()")
    os.killpg(family.parent.pid, signal.SIGINT)
    assert family.ended_by() == "SIGTERM" and family.parent.returncode == 0


def test_a_fork_of_the_parent_ends_no_workers(tmp_path: Path) -> None:
    then = """
report()
fork = os.fork()
if fork:
    print(os.waitpid(fork, 0)[1], os.path.exists(supervisor.directory), supervisor.poll()[0].status, flush=True)
    time.sleep(600)
"""
    family = Family(tmp_path, then)
    assert family.parent.stdout is not None
    assert family.parent.stdout.readline() == "0 True running\n" and alive(family.worker)
    family.parent.terminate()
    family.ended_by()
    family.sockets.rmdir()


def test_a_worker_whose_parent_is_gone_before_it_looks_ends() -> None:
    """By another process id of its parent."""
    code = "from pilotfish.engine.processes.process import die_with_parent; "
    worker = subprocess.run(
        [sys.executable, "-c", code + f"die_with_parent(); {SLEEP}"],
        env={**os.environ, PARENT: "1" if os.getpid() != 1 else "2"},
        stdin=subprocess.DEVNULL,
        timeout=LIMIT,
        check=False,
    )
    assert worker.returncode == 1


def test_a_process_that_nobody_supervises_lives_on() -> None:
    code = "from pilotfish.engine.processes.process import die_with_parent; die_with_parent()"
    assert subprocess.run([sys.executable, "-c", code], timeout=LIMIT, check=False).returncode == 0


def test_whoever_asks_is_told_the_lines_of_stdout(supervisor: Supervisor, capfd: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    code = f"import sys; print('one\\ntwo', flush=True); print('log', file=sys.stderr); {SLEEP}"
    supervisor.start([python(code, told=told.append)])
    eventually(lambda: len(told) == 2)
    assert told == ["one\n", "two\n"]
    eventually(lambda: "log" in capfd.readouterr().err)


def test_lines_that_are_no_json_become_messages_where_lines_are_json(
    supervisor: Supervisor, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    code = f"""
import sys, time
for line in ('{{"message": "mine", "long": "' + 9000 * "x" + '"}}', "", "Traceback of a \\x1b[31mlibrary"):
    print(line, file=sys.stderr)
{SLEEP}"""
    supervisor.start([python(code, environment={LOG_FORMAT: "json"})])
    eventually(lambda: bool(caplog.records))
    assert [record.message for record in caplog.records] == ["draft 0: Traceback of a \x1b[31mlibrary"]
    (line,) = capfd.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "mine"


# -- what a worker finds


def found(supervisor: Supervisor, tmp_path: Path, expression: str, **fields: object) -> str:
    """What an expression is in a worker."""
    code = f"""
import os, sys
with open(sys.argv[1] + ".part", "w") as file:
    print({expression}, file=file, end="")
os.rename(file.name, sys.argv[1])
{SLEEP}"""
    supervisor.start([python(code, str(tmp_path / "found"), **fields)])
    eventually((tmp_path / "found").exists)
    return (tmp_path / "found").read_text()


def test_a_worker_is_pinned_and_sizes_its_threads(supervisor: Supervisor, tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "MINE")
    expression = f"[sorted(os.sched_getaffinity(0)), *(os.environ[n] for n in {names})]"
    fields = {"cores": frozenset({core}), "environment": {"MINE": "yes", "MKL_NUM_THREADS": "3"}}
    assert found(supervisor, tmp_path, expression, **fields) == str([[core], "1", "3", "passive", "yes"])
    assert os.sched_getaffinity(0) == before


def test_the_directory_is_private_and_short(monkeypatch: pytest.MonkeyPatch, supervisor: Supervisor) -> None:
    assert supervisor.directory.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(launch.tempfile, "gettempdir", lambda: "/tmp/" + "long" * 30)
    with closing(Supervisor()) as other:
        assert len(os.fsencode(other.directory)) < launch.LONGEST_BASE + 24 and other.directory.is_dir()
        (other.directory / "socket").touch()
    assert not other.directory.exists()


# -- waiting


def test_waiting_ends_when_it_is_ready_or_the_time_is_up() -> None:
    answers = iter([False, False, True])
    wait_until(lambda: next(answers), lambda: None, LIMIT, "nothing")
    with pytest.raises(EngineError, match=r"^draft workers: not ready within 0\.02 s$"):
        wait_until(lambda: False, lambda: None, 0.02, "draft workers")


# -- memory of large messages that was freed is used again, not given back to the system each time

TURNS, AT_ONCE, SIZE = 20, 16, 1 << 20
FAULTS = f"""
import resource, sys
from pilotfish.engine.processes.process import keep_freed_memory

if sys.argv[1] == "kept":
    keep_freed_memory()

def turn():
    messages = [bytearray(b"x") * {SIZE} for _ in range({AT_ONCE})]

turn()
turn()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({TURNS}):
    turn()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def cleared_pages(how: str) -> int:
    return int(subprocess.check_output([sys.executable, "-c", FAULTS, how]))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
def test_freed_memory_is_used_again() -> None:
    pages = TURNS * AT_ONCE * SIZE // 4096
    assert cleared_pages("kept") < pages // 100
    assert cleared_pages("given back") > pages // 2
