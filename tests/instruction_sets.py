"""The tests of the kernels under other instruction sets of this processor than its best."""

import os
import subprocess
import sys
from pathlib import Path

from pilotfish.model.cpu import native

MODEL = Path(__file__).parent / "model"


def usable() -> list[str]:
    return [name for name in native._flags() if native._has(name)]


def others() -> list[str]:
    """Those that this process does not use."""
    return [name for name in usable()[1:] if name != os.environ.get(native.FORCED)]


def check_kernels(name: str) -> None:
    """In a process that has no other."""
    environment = {**os.environ, native.FORCED: name, "OMP_NUM_THREADS": "1"}
    tests = [MODEL / "test_kernels.py", MODEL / "test_decoder.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
