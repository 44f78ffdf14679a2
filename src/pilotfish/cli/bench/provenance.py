"""How a result came about: command, date, commit and versions."""

from __future__ import annotations

import json
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pilotfish.cli.pages.document import write_file

PACKAGES = ("pilotfish", "torch", "transformers")


def provenance() -> dict[str, Any]:
    """`commit` is that of the source, with a + where files differ from it; without a repository, the version."""
    versions = {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}
    return {
        "command": shlex.join(["pilotfish", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(Path(__file__).parent) or versions["pilotfish"],
        "versions": versions,
    }


def write_toml(said: str, values: Mapping[str, Any], path: Path) -> None:
    """For `--save`: what was found, with how it came about as comments."""
    made = provenance()
    head = (said, f"{made['date']}, commit {made['commit']}", made["command"])
    lines = [*(f"# {line}" for line in head), *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
    write_file("\n".join(lines) + "\n", path, "save")


def _commit(directory: Path) -> str:
    """Empty for an installation, which may lie in somebody else's repository."""
    if not _git(directory, "ls-files", "--error-unmatch", Path(__file__).name):
        return ""
    return _git(directory, "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*")


def _git(directory: Path, *arguments: str) -> str:
    try:
        command = ["git", "-C", str(directory), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
