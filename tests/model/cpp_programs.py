"""Programs over the C++ kernels, without torch."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

from pilotfish.config.cache import cache_folder, made_once
from pilotfish.model.cpu import native

SOURCES = Path(__file__).parent / "kernels"


def program(source: str, *flags: str, compiler: str = "c++") -> Path:
    """Of a file of `SOURCES`, compiled once, as the kernels are. AssertionError with what the compiler says."""
    command = [compiler, *native._FLAGS, *flags, f"-I{native._SOURCES}", str(SOURCES / source), "-pthread"]
    files = sorted((*SOURCES.iterdir(), *native._SOURCES.glob("*.h")))
    digest = hashlib.sha256("\0".join((*command, *(path.read_text() for path in files))).encode()).hexdigest()[:16]

    def compiled(made: Path) -> None:
        done = subprocess.run([*command, "-o", made], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    return made_once(cache_folder("programs") / digest / source.removesuffix(".cpp"), compiled)
