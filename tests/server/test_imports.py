"""The server starts without what it does not need."""

from __future__ import annotations

import subprocess
import sys


def test_the_server_knows_no_tensors() -> None:
    check = "import sys, pilotfish.server.routes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
