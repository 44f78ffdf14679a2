"""How a result came about: command, date, commit and versions."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

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


def _commit(directory: Path) -> str:
    return (
        _git(directory, "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*")
        if _is_ours(directory)
        else ""
    )


def _is_ours(directory: Path) -> bool:
    """Whether the file is one of a repository's, and not of an installation that lies in somebody else's."""
    return bool(_git(directory, "ls-files", "--error-unmatch", Path(__file__).name))


def _git(directory: Path, *arguments: str) -> str:
    try:
        command = ["git", "-C", str(directory), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
