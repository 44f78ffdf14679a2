"""Figures of the demo's runs, and the table that shows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from operator import eq
from statistics import median
from typing import Any, get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pilotfish.cli.bench.contestants import OFF, Run, joined, rates
from pilotfish.cli.demo.demo_runs import Scene
from pilotfish.cli.show import paced
from pilotfish.config.fields import Mode
from pilotfish.model.pacer import Pacer

DEPTHS_SHOWN = 8


def record_of(runs: Mapping[str, Sequence[Run]], cores: Mapping[str, int]) -> dict[str, Any]:
    """Figures of each mode, and of all beside off, over the rounds that all of them have run. `cores` are those that
    the target could run on."""
    count = min(map(len, runs.values()))
    modes = {mode: runs[mode][:count] for mode in get_args(Mode)}
    figures = {mode: figures_of(own, cores[mode]) for mode, own in modes.items()}
    outputs = {mode: joined(own).outputs for mode, own in modes.items()}
    off, others = figures[OFF]["tokens_per_second"], [mode for mode in modes if mode != OFF]
    return {
        **figures,
        "speedup": {mode: figures[mode]["tokens_per_second"] / off for mode in others},
        "sequences": len(outputs[OFF]),
        "matched": {mode: sum(map(eq, outputs[OFF], outputs[mode])) for mode in others},
    }


def figures_of(runs: Sequence[Run], cores: int) -> dict[str, Any]:
    """Medians and counts over all runs. Depths count verify steps: whose tree reached depth 1, 2, …, and that accepted
    a token there. Time went to the draft, the target's forward, sampling and walking, all else."""
    own, speeds = joined(runs), rates(runs)
    shares = {part: own.spent(part) / own.seconds for part in ("draft", "forward", "verify")}
    return {
        "tokens_per_second": median(speeds),
        "tokens_per_second_rounds": speeds,
        "tokens_per_verify_step": own.tokens / own.total("verify_steps"),
        "target_cores": cores,
        "offered_by_depth": own.by_depth("offered_by_depth"),
        "accepted_by_depth": own.by_depth("accepted_by_depth"),
        "accepted_by_origin": own.accepted_by_origin,
        "time_share": {**shares, "other": max(0.0, 1.0 - sum(shares.values()))},
    }


def all_equal(record: Mapping[str, Any]) -> bool:
    """Whether every mode's outputs are those of off."""
    return all(count == record["sequences"] for count in record["matched"].values())


def verdict(record: Mapping[str, Any]) -> str:
    """Which of sync and async is ahead, and why that need not be async."""
    if not record["valid"]:
        return "no verdict: the machine did not hold the pace, so this says nothing about such devices"
    ratio = record["async"]["tokens_per_second"] / record["sync"]["tokens_per_second"]
    if ratio >= 1:
        return f"async is ahead: {ratio:.2f} times as fast as sync"
    own, all_cores = (record[mode]["target_cores"] for mode in ("async", "sync"))
    why = f": it leaves its target {own} of the {all_cores} cores that sync's has" if own < all_cores else ""
    return f"async is behind: {ratio:.2f} times as fast as sync{why}"


def show_table(scene: Scene, record: Mapping[str, Any], pacing: Sequence[Pacer], console: Console) -> None:
    table = Table("", title=scene.title, title_justify="left", box=None, pad_edge=False)
    for mode in get_args(Mode):
        table.add_column(mode, justify="right")
    for number, (heading, cells) in enumerate(_rows([record[mode] for mode in get_args(Mode)])):
        table.add_row(heading, *cells, style=None if number else "bold")
    console.print(table)
    speeds = ", ".join(f"{mode} {speedup:.2f}" for mode, speedup in record["speedup"].items())
    total = record["sequences"] * len(record["matched"])
    equal = f"{sum(record['matched'].values())} of {total} outputs equal token for token ({record['dtype']})"
    style = "bold" if all_equal(record) else "bold yellow"
    console.print(Text(f"\ntimes off: {speeds}; {equal}", style=style), soft_wrap=True)
    console.print(Text(verdict(record), style="bold"), soft_wrap=True)
    if pacing:
        console.print(paced(pacing), soft_wrap=True)
    console.print()


def _rows(figures: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Iterable[str]]]:
    yield "tokens/s, median", [f"{one['tokens_per_second']:.1f}" for one in figures]
    rounds = [one["tokens_per_second_rounds"] for one in figures]
    yield "  slowest to fastest round", [f"{min(speeds):.1f} to {max(speeds):.1f}" for speeds in rounds]
    yield "tokens per verify step", [f"{one['tokens_per_verify_step']:.2f}" for one in figures]
    yield "cores of the target", [str(one["target_cores"]) for one in figures]
    for part in figures[0]["time_share"]:
        yield f"time: {part}", [f"{one['time_share'][part]:.0%}" for one in figures]
    for name in dict.fromkeys(name for one in figures for name in one["accepted_by_origin"]):
        cells = [str(one["accepted_by_origin"].get(name, 0)) if one["offered_by_depth"] else "" for one in figures]
        yield f"accepted, guessed by {name}", cells
    depths = zip_longest(*map(_accepted, figures), fillvalue="")
    for depth, shares in enumerate(islice(depths, DEPTHS_SHOWN), 1):
        yield f"accepted at depth {depth}", shares


def _accepted(figures: dict[str, Any]) -> list[str]:
    depths = zip(figures["accepted_by_depth"], figures["offered_by_depth"], strict=True)
    return [f"{accepted} of {offered} · {accepted / offered:4.0%}" for accepted, offered in depths]
