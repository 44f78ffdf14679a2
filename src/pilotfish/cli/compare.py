"""Modes against each other: the same target, prompts and seeds, round after round."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
    """All prompts, one after the other, once."""

    seconds: float
    outputs: list[list[int]]
    stats: list[RequestStats]
    times: StepTimes

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.outputs)) / self.seconds


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


@contextmanager
def speculation_off(engine: Engine) -> Iterator[None]:
    """Every step plain decoding; only while no request runs."""
    drafter, budget = engine.drafter, engine.worker.budget
    engine.use(NoDrafter(), FixedBudget(0, 0))
    try:
        yield
    finally:
        engine.use(drafter, budget)


@dataclass(frozen=True)
class Summary:
    """One mode over all rounds."""

    passes: list[Pass]
    cores: int  # that the target could run on

    @property
    def speeds(self) -> list[float]:
        return [one.tokens_per_second for one in self.passes]

    @property
    def tokens_per_second(self) -> float:
        return median(self.speeds)

    @property
    def tokens_per_verify_step(self) -> float:
        steps = sum(stats.verify_steps for stats in self._stats)
        return sum(len(tokens) for one in self.passes for tokens in one.outputs) / steps

    @property
    def offered_by_depth(self) -> list[int]:
        """Verify steps whose tree reached depth 1, 2, …"""
        return _summed([stats.offered_by_depth for stats in self._stats])

    @property
    def accepted_by_depth(self) -> list[int]:
        """Of those, the steps that accepted a token there."""
        return _summed([stats.accepted_by_depth for stats in self._stats])

    @property
    def accepted_by_origin(self) -> dict[str, int]:
        """Accepted tokens by who guessed them."""
        return dict(sum((Counter(stats.accepted_by_origin) for stats in self._stats), Counter[str]()))

    @property
    def time_share(self) -> dict[str, float]:
        """Where the time went: the draft, the target's forward, sampling and walking, all else."""
        total = sum(one.seconds for one in self.passes)
        parts = ("draft", "forward", "verify")
        shares = {part: sum(getattr(one.times, part) for one in self.passes) / total for part in parts}
        return {**shares, "other": max(0.0, 1.0 - sum(shares.values()))}

    @property
    def _stats(self) -> list[RequestStats]:
        return [stats for one in self.passes for stats in one.stats]

    def record(self) -> dict[str, Any]:
        return {
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_rounds": self.speeds,
            "tokens_per_verify_step": self.tokens_per_verify_step,
            "target_cores": self.cores,
            "offered_by_depth": self.offered_by_depth,
            "accepted_by_depth": self.accepted_by_depth,
            "accepted_by_origin": self.accepted_by_origin,
            "time_share": self.time_share,
        }


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
        """Of each mode."""
        return sum(len(one.outputs) for one in self.modes["off"].passes)

    def matched(self, mode: str) -> int:
        """Sequences whose tokens are those of off."""
        pairs = zip(self.modes["off"].passes, self.modes[mode].passes, strict=True)
        return sum(a == b for off, other in pairs for a, b in zip(off.outputs, other.outputs, strict=True))

    @property
    def equal(self) -> bool:
        return all(self.matched(mode) == self.sequences for mode in self.others)

    def speedup(self, mode: str) -> float:
        return self.modes[mode].tokens_per_second / self.modes["off"].tokens_per_second


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
    """A column for each mode."""
    summaries = list(modes.values())
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column()
    for name in modes:
        table.add_column(name, justify="right")
    table.add_row("tokens/s, median", *(f"{s.tokens_per_second:.1f}" for s in summaries), style="bold")
    table.add_row("  slowest to fastest round", *map(_spread, summaries))
    table.add_row("tokens per verify step", *(f"{s.tokens_per_verify_step:.2f}" for s in summaries))
    table.add_row("cores of the target", *(str(s.cores) for s in summaries))
    for part in modes["off"].time_share:
        table.add_row(f"time: {part}", *(f"{s.time_share[part]:.0%}" for s in summaries))
    for origin in dict.fromkeys(name for s in summaries for name in s.accepted_by_origin):
        table.add_row(f"accepted, guessed by {origin}", *(_guessed(s, origin) for s in summaries))
    depths = zip_longest(*map(_accepted, summaries), fillvalue="")
    for depth, cells in enumerate(islice(depths, DEPTHS_SHOWN), 1):
        table.add_row(f"accepted at depth {depth}", *cells)
    return table


def _spread(summary: Summary) -> str:
    return f"{min(summary.speeds):.1f} to {max(summary.speeds):.1f}"


def _guessed(summary: Summary, origin: str) -> str:
    """Accepted tokens of an origin."""
    return str(summary.accepted_by_origin.get(origin, 0)) if summary.offered_by_depth else ""


def _accepted(summary: Summary) -> list[str]:
    """By depth."""
    depths = zip(summary.accepted_by_depth, summary.offered_by_depth, strict=True)
    return [f"{accepted} of {offered} · {accepted / offered:4.0%}" for accepted, offered in depths]
