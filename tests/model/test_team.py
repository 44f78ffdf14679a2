"""The team of threads that computes kernels (src/pilotfish/model/cpu/kernels/team.h), by a program without torch."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pilotfish.model.cpu import native

STRESS = Path(__file__).parent / "kernels" / "stress.cpp"
SANITIZED = ["-fsanitize=thread", "-g", "-O1"]


def built(tmp_path: Path, *flags: str, sources: Path = native._SOURCES) -> Path:
    program = tmp_path / "stress"
    command = ["c++", *native._FLAGS, *flags, f"-I{sources}", str(STRESS), "-o", str(program), "-pthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in done.stderr and "tsan" in done.stderr:
        pytest.skip("the compiler has no ThreadSanitizer")
    assert done.returncode == 0, done.stderr
    return program


def run(program: Path, regions: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, str(regions)], capture_output=True, text=True, check=False)


def test_every_chunk_is_done_once_and_seen_by_the_next_phase(tmp_path: Path) -> None:
    done = run(built(tmp_path), 5000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "5000 regions, 0 wrong\n"


def test_no_two_threads_meet_without_order(tmp_path: Path) -> None:
    done = run(built(tmp_path, *SANITIZED), 300)
    assert done.returncode == 0, done.stdout + done.stderr[:3000]


def test_an_order_that_is_missing_is_found(tmp_path: Path) -> None:
    """Whoever sees that a phase is over need not see what it wrote."""
    right = "next_.store((phase + 1) << kChunkBits, std::memory_order_release)"
    team = (native._SOURCES / "team.h").read_text()
    assert team.count(right) == 1
    (tmp_path / "team.h").write_text(team.replace(right, right.replace("release", "relaxed")))
    program = built(tmp_path, *SANITIZED, sources=tmp_path)
    runs = (run(program, 1000) for _ in range(20))  # it takes two threads that run at the same time
    assert any(done.returncode != 0 and "data race" in done.stderr for done in runs)
