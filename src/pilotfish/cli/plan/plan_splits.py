"""`pilotfish plan splits`: how many of 8 devices should run the target."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pilotfish.cli.options import JsonOption
from pilotfish.cli.show import print_json, progress_bar

if TYPE_CHECKING:
    from pilotfish.plan.simulation.device_splits import SplitCurve

#: Columns of a table in a file.
WIDTH = 120


def splits(json: JsonOption = False) -> None:
    """Simulate SwiftSpec's pairs at each split of 8 devices, beside the published best. Takes a minute or two."""
    from rich.console import Console

    from pilotfish.plan.simulation.device_splits import SPLITS, curves, runs_of

    with progress_bar(Console(stderr=True), runs_of(SPLITS), "runs") as advance:
        found = curves(SPLITS, advance)
    _print_json(found) if json else _print(found)


def _print_json(found: dict[str, SplitCurve]) -> None:
    from msgspec import to_builtins

    from pilotfish.plan.simulation.device_splits import SPLITS

    print_json({
        name: {
            "published": SPLITS.pairs[name].best,
            "best": curve.best.target,
            "behind": curve.behind(SPLITS.pairs[name].best[0]),
            **to_builtins(curve),
        }
        for name, curve in found.items()
    })  # fmt: skip


def _print(found: dict[str, SplitCurve]) -> None:
    from rich.console import Console
    from rich.table import Table

    from pilotfish.plan.simulation.device_splits import SPLITS

    splits = [_split(target) for target in range(1, SPLITS.devices)]
    table = Table(box=None, pad_edge=False, header_style="bold", title="tokens/s, target + draft", title_justify="left")
    table.add_column("pair", no_wrap=True)
    for heading in ("chance", *splits, "in turn", "best", "published", "behind"):
        table.add_column(heading, justify="right")
    for name, curve in found.items():
        published = SPLITS.pairs[name].best
        rates = [f"{point.rate:.0f}" for point in curve.points]
        bests = (_split(curve.best.target), " or ".join(map(_split, published)))
        table.add_row(name, f"{curve.acceptance:.2f}", *rates, *bests, f"{curve.behind(published[0]):+.1%}")
    Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH).print(table)


def _split(target: int) -> str:
    from pilotfish.plan.simulation.device_splits import SPLITS

    return f"{target}+{SPLITS.devices - target}"
