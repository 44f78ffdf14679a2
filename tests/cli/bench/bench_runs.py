"""Types of the fixtures that run benches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pilotfish.cli.bench.report import Report

#: Runs a bench: its function, its command and options.
Measure = Callable[..., Report]
#: Runs a command with options on the tiny pair; its JSON.
Invoke = Callable[..., dict[str, Any]]
