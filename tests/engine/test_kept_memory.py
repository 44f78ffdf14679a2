"""Memory of large messages that was freed is used again, not given back to the system each time."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

TURNS, AT_ONCE, SIZE = 20, 16, 1 << 20
PROGRAM = f"""
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
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another malloc")
def test_freed_memory_is_used_again() -> None:
    pages = TURNS * AT_ONCE * SIZE // 4096
    assert cleared_pages("kept") < pages // 100
    assert cleared_pages("given back") > pages // 2
