"""A busy neighbour: a process that keeps one core busy until its parent ends."""

from __future__ import annotations

import sys

from pilotfish.engine.processes.process import die_with_parent, name_process

if __name__ == "__main__":
    name_process("busy neighbour")
    die_with_parent()
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    while True:
        pass
