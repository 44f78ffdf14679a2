"""The team of threads that computes kernels (src/pilotfish/model/cpu/kernels/team.h), by a program without torch."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from sizes import in_soak, sized

from pilotfish.model.cpu import native

STRESS = Path(__file__).parent / "kernels" / "stress.cpp"
SANITIZED = ["-fsanitize=thread", "-g", "-O1"]


def built(tmp_path: Path, *flags: str) -> Path:
    program = tmp_path / "stress"
    command = ["c++", *native._FLAGS, *flags, f"-I{native._SOURCES}", str(STRESS), "-o", str(program), "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in done.stderr and "tsan" in done.stderr:
        pytest.skip("the compiler has no ThreadSanitizer")
    assert done.returncode == 0, done.stderr
    return program


def run(program: Path, regions: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, str(regions)], capture_output=True, text=True, check=False)


def test_every_chunk_is_done_once_and_seen_by_the_next_phase(tmp_path: Path) -> None:
    regions = sized(1000, 5000)
    done = run(built(tmp_path), regions)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"{regions} regions, 0 wrong\n"


@in_soak
def test_no_two_threads_meet_without_order(tmp_path: Path) -> None:
    done = run(built(tmp_path, *SANITIZED), 300)
    assert done.returncode == 0, done.stdout + done.stderr[:3000]
