"""Processes that end in order, or are killed: what they are called, and that nothing of them stays."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import sleep

import pytest
from sizes import in_soak, paired
from support import eventually
from workers import LIMIT, Start


def title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


@pytest.mark.parametrize(("number", "moment"), paired([signal.SIGINT, signal.SIGTERM], ["loading", "serving"]))
def test_a_pool_ends_in_order(number: int, moment: str, pool: Start, draft: Path, tmp_path: Path) -> None:
    worker = pool(draft, "--name", "draft 0")
    path = tmp_path / "pool"
    eventually(path.exists)  # before the model is loaded
    if moment == "serving":
        sleep(0.5)
    assert title(worker.pid) == "pilotfish: draft 0"
    os.kill(worker.pid, number)
    eventually(lambda: not worker.running)
    assert worker.end().code == 0 and not path.exists()


@pytest.fixture
def target(llama: Path, draft: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`pilotfish generate` that goes on for long, its temporary files in `tmp_path`."""
    fixed = ["--dtype", "float32", "--threads", "1", "--eager", "--budget", "fixed", "--max-tokens", "100000"]
    options = ["--target", str(llama), "--draft", str(draft), "--mode", "async", "--prompt", "a", "--ignore-eos"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-m", "pilotfish", "generate", *fixed, *options]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True) as process:
        yield process
        process.kill()


@in_soak
def test_a_target_that_is_killed_leaves_nothing(target: subprocess.Popen[bytes], tmp_path: Path) -> None:
    eventually(lambda: any(path.name.startswith("draft-") for path in tmp_path.glob("pilotfish-*/*")), 60)
    children = Path(f"/proc/{target.pid}/task").glob("*/children")
    named = {int(pid) for path in children for pid in path.read_text().split()}
    assert title(target.pid) == "pilotfish: target"
    assert [title(pid) for pid in named if title(pid).startswith("pilotfish")] == ["pilotfish: draft 0"]
    target.kill()
    target.wait(LIMIT)
    eventually(lambda: not any(title(pid) for pid in named))
    eventually(lambda: not list(tmp_path.glob("pilotfish-*")))
