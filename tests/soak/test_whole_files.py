"""Files of the suite with all examples and cases that the suite leaves out for its time (tests/sizes.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sizes import WHOLE

TESTS = Path(__file__).parents[1]
#: Modules that say how much a test does; the second, which modes of a server are asked.
SIZED = ("sizes", "openai_fleet")
FILES = sorted(
    str(path.relative_to(TESTS))
    for path in TESTS.rglob("test_*.py")
    if path.parent.name != "soak" and any(f"from {name} import" in path.read_text() for name in SIZED)
)


def test_there_are_some() -> None:
    assert FILES


@pytest.mark.parametrize("name", FILES)
def test_all_of_a_file(name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", TESTS / name]
    done = subprocess.run(command, env={**os.environ, WHOLE: "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
