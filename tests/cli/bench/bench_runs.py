"""The type of the fixture that runs benches."""

from __future__ import annotations

from collections.abc import Callable

from pilotfish.cli.bench.report import Report

#: Runs a bench: its function, its command and options.
Measure = Callable[..., Report]
