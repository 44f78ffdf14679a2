"""What commands are given and leave behind, and the types of the fixtures that run them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pilotfish.cli.bench.report import Report
from pilotfish.server.application import ServerSetup

#: The tiny model in float32, on one thread.
PLAIN = ("--dtype", "float32", "--threads", 1)


def write_rows(path: Path, *rows: object) -> Path:
    """A line for each: an object as JSON, a text as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    stdout: str
    stderr: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Every line of stdout, each a JSON object."""
        return [json.loads(line) for line in self.stdout.splitlines()]


Run = Callable[..., Result]
Refused = Callable[..., str]
Configured = Callable[..., ServerSetup]
Measure = Callable[..., Report]
