"""The team of threads that computes kernels (src/pilotfish/model/cpu/kernels/team.h), by a program without torch."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from cpp_programs import program
from sizes import in_soak, sized

SANITIZED = ["-fsanitize=thread", "-g", "-O1"]


def run(program: Path, regions: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, str(regions)], capture_output=True, text=True, check=False)


def test_every_chunk_is_done_once_and_seen_by_the_next_phase() -> None:
    regions = sized(1000, 5000)
    done = run(program("stress.cpp"), regions)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == f"{regions} regions, 0 wrong\n"


@in_soak
def test_no_two_threads_meet_without_order() -> None:
    try:
        stress = program("stress.cpp", *SANITIZED)
    except AssertionError as error:
        if "cannot find" in str(error) and "tsan" in str(error):
            pytest.skip("the compiler has no ThreadSanitizer")
        raise
    done = run(stress, 300)
    assert done.returncode == 0, done.stdout + done.stderr[:3000]
