"""`pilotfish plan splits`: how many of 8 devices should run the target."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pilotfish.cli.options import JsonOption
from pilotfish.cli.show import print_json, progress_bar

if TYPE_CHECKING:
    from pilotfish.simulation.device_splits import SplitCurve

#: Columns of a table in a file.
WIDTH = 120


def splits(json: JsonOption = False) -> None:
    """Simulate SwiftSpec's pairs at each split of 8 devices between target and draft. Takes a minute or two."""
    from rich.console import Console

    from pilotfish.simulation.device_splits import SPLITS, curves, runs_of

    with progress_bar(Console(stderr=True), runs_of(SPLITS), "runs") as advance:
        found = curves(SPLITS, advance)
    _print_json(found) if json else _print(found)


def _print_json(found: dict[str, SplitCurve]) -> None:
    from msgspec import to_builtins

    print_json({name: {**to_builtins(curve), "best": curve.best.target} for name, curve in found.items()})


def _print(found: dict[str, SplitCurve]) -> None:
    from rich.console import Console
    from rich.table import Table

    devices = len(next(iter(found.values())).points)
    splits = [f"{target}+{devices - target}" for target in range(1, devices)]
    table = Table(box=None, pad_edge=False, header_style="bold", title="tokens/s, target + draft", title_justify="left")
    table.add_column("pair", no_wrap=True)
    for heading in ("guess right", *splits, "in turn", "best"):
        table.add_column(heading, justify="right")
    for name, curve in found.items():
        rates = [f"{point.rate:.0f}" for point in curve.points]
        best = f"{curve.best.target}+{devices - curve.best.target}"
        table.add_row(name, f"{curve.acceptance:.2f}", *rates, best)
    Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH).print(table)
