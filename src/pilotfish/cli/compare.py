"""Modes against each other: the same target, prompts and seeds, round after round."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, zip_longest
from statistics import median
from typing import TYPE_CHECKING, Any, get_args

from rich.table import Table

from pilotfish.config import Mode, available_cores
from pilotfish.core.budget import FixedBudget
from pilotfish.core.drafter import NoDrafter
from pilotfish.core.request import RequestStats
from pilotfish.core.sampling_params import SamplingParams

if TYPE_CHECKING:  # imports torch
    from pilotfish.engine.engine import Engine
    from pilotfish.target.worker import StepTimes

DEPTHS_SHOWN = 8


@dataclass(frozen=True)
class Pass:
    """A run of all prompts, one after the other."""

    seconds: float
    outputs: list[list[int]]
    stats: list[RequestStats]
    times: StepTimes


def run_pass(engine: Engine, prompts: Sequence[str], params: SamplingParams) -> Pass:
    """Run each prompt alone to its end."""
    before, began = replace(engine.worker.times), time.perf_counter()
    samples = []
    for prompt in prompts:
        samples += engine.submit(prompt, params)
        while engine.busy:
            engine.step()
    seconds = time.perf_counter() - began
    times = engine.worker.times.minus(before)
    return Pass(seconds, [s.token_ids for s in samples], [s.request.stats for s in samples], times)


def run_plain_pass(engine: Engine, prompts: Sequence[str], params: SamplingParams) -> Pass:
    """The same without speculation."""
    drafter, budget = engine.drafter, engine.worker.budget
    engine.use(NoDrafter(), FixedBudget(0, 0))
    try:
        return run_pass(engine, prompts, params)
    finally:
        engine.use(drafter, budget)


@dataclass(frozen=True)
class Summary:
    """A mode over all rounds."""

    passes: list[Pass]
    cores: int  # that the target could run on

    @cached_property
    def figures(self) -> dict[str, Any]:
        """Medians and counts over all passes. Depths count verify steps: whose tree reached depth 1, 2, …, and that
        accepted a token there."""
        stats = [one for run in self.passes for one in run.stats]
        speeds = [sum(map(len, run.outputs)) / run.seconds for run in self.passes]
        tokens = sum(len(output) for run in self.passes for output in run.outputs)
        origins = sum((Counter(one.accepted_by_origin) for one in stats), Counter[str]())
        return {
            "tokens_per_second": median(speeds),
            "tokens_per_second_rounds": speeds,
            "tokens_per_verify_step": tokens / sum(one.verify_steps for one in stats),
            "target_cores": self.cores,
            "offered_by_depth": _summed([one.offered_by_depth for one in stats]),
            "accepted_by_depth": _summed([one.accepted_by_depth for one in stats]),
            "accepted_by_origin": dict(origins),
            "time_share": self._time_share(),
        }

    def _time_share(self) -> dict[str, float]:
        """Where the time went: the draft, the target's forward, sampling and walking, all else."""
        total = sum(run.seconds for run in self.passes)
        parts = ("draft", "forward", "verify")
        shares = {part: sum(getattr(run.times, part) for run in self.passes) / total for part in parts}
        return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}


def _summed(lists: Sequence[Sequence[int]]) -> list[int]:
    return [sum(counts) for counts in zip_longest(*lists, fillvalue=0)]


@dataclass(frozen=True)
class Comparison:
    """Modes over the rounds that all of them have run, each held against `off`, the first."""

    modes: dict[str, Summary]

    @classmethod
    def of(cls, modes: Mapping[str, Summary]) -> Comparison:
        rounds = min(len(summary.passes) for summary in modes.values())
        ordered = [mode for mode in get_args(Mode) if mode in modes]
        return cls({mode: Summary(modes[mode].passes[:rounds], modes[mode].cores) for mode in ordered})

    @property
    def others(self) -> list[str]:
        """Every mode but off."""
        return list(self.modes)[1:]

    @property
    def sequences(self) -> int:
        return sum(len(one.outputs) for one in self.modes["off"].passes)

    def matched(self, mode: str) -> int:
        """Sequences whose tokens are those of off."""
        pairs = zip(self.modes["off"].passes, self.modes[mode].passes, strict=True)
        return sum(a == b for off, other in pairs for a, b in zip(off.outputs, other.outputs, strict=True))

    @property
    def equal(self) -> bool:
        return all(self.matched(mode) == self.sequences for mode in self.others)

    def speedup(self, mode: str) -> float:
        of = {name: self.modes[name].figures["tokens_per_second"] for name in (mode, "off")}
        return float(of[mode] / of["off"])

    def record(self) -> dict[str, Any]:
        return {
            **{mode: summary.figures for mode, summary in self.modes.items()},
            "speedup": {mode: self.speedup(mode) for mode in self.others},
            "sequences": self.sequences,
            "matched": {mode: self.matched(mode) for mode in self.others},
        }


#: One pass of a mode with such parameters.
RunMode = Callable[[SamplingParams], Pass]


def run_rounds(
    modes: Mapping[str, RunMode], params: SamplingParams, *, rounds: int, budget: float
) -> dict[str, Summary]:
    """Up to `rounds` rounds of all modes in turn, each with its own seed; no second one that would not end within
    `budget` seconds."""
    summaries = {name: Summary([], available_cores()) for name in modes}
    began = time.perf_counter()
    for done in range(rounds):
        if done and (time.perf_counter() - began) * (done + 1) / done > budget:
            break
        for name, run in modes.items():
            summaries[name].passes.append(run(replace(params, seed=done)))
    return summaries


def comparison_table(title: str, modes: Mapping[str, Summary]) -> Table:
    table = Table("", title=title, title_justify="left", box=None, pad_edge=False)
    for name in modes:
        table.add_column(name, justify="right")
    for number, (heading, cells) in enumerate(_rows([summary.figures for summary in modes.values()])):
        table.add_row(heading, *cells, style=None if number else "bold")
    return table


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
