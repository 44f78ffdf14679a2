"""Drafts of one target against each other, LMs and trained heads: what is accepted of them for the same time of
drafting, whether a tree is ever worth less than a chain of as many nodes, and the speed beside a slow target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pilotfish.bench.acceptance import ACCEPTANCE_CONCURRENCY, acceptance
from pilotfish.bench.contestants import OFF, PLAIN, Contestant, compete, contestant_of, speed_of
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.report import ProgressBar, Report, Row
from pilotfish.bench.workload import TEMPERATURES, Prompt, jobs_at
from pilotfish.core.drafting.drafter import CombinedDrafter, Drafter
from pilotfish.core.scheduling.budget import FixedBudget
from pilotfish.engine.engine import Engine
from pilotfish.workers.lm import LMDrafter
from pilotfish.workers.ngram import NgramDrafter

#: Prompts whose levels are timed, one at a time.
TIMED = 4
#: Prompts generated beside a slow target.
PACED = 12
#: Drafters of each draft: alone and with n-grams for as long as is asked, then as a chain and as a tree of all nodes.
PLAYED = 4


@dataclass(frozen=True)
class Ground:
    """One draft's engine, and what it is asked for."""

    engine: Engine
    name: str
    prompts: list[Prompt]
    options: BenchOptions
    progress: ProgressBar

    def play(self, drafter: Callable[[], Drafter], name: str, levels: int, temperature: float) -> Row:
        jobs = jobs_at(self.prompts, temperature, self.options.max_tokens)
        contestant = Contestant(drafter, partial(FixedBudget, self.engine.config.nodes, levels))
        done = partial(self.progress, f"{name}, T={temperature:g}")
        run = contestant.run(self.engine, jobs, ACCEPTANCE_CONCURRENCY, done)
        return {"drafter": name, "temperature": temperature, "levels": levels, **acceptance(run)}

    def level_ms(self) -> float:
        """Of a level of one sequence, as wide as is configured."""
        drafter = self.engine.drafters.make_lm()
        jobs = jobs_at(self.prompts[:TIMED], 0.0, self.options.max_tokens)
        contestant = Contestant(
            lambda: drafter, partial(FixedBudget, self.engine.config.nodes, self.engine.config.levels)
        )
        contestant.run(self.engine, jobs, 1, partial(self.progress, f"{self.name}, timed"))
        return 1000 * drafter.level_seconds(1)

    def at_equal_cost(self, levels: int) -> list[Row]:
        """The draft alone and with n-grams."""
        make_lm, mixed = self.engine.drafters.make_lm, f"{self.name}+ngram"
        return [
            row
            for temperature in TEMPERATURES
            for row in (
                self.play(make_lm, self.name, levels, temperature),
                self.play(lambda: CombinedDrafter([make_lm(), NgramDrafter()]), mixed, levels, temperature),
            )
        ]

    def shapes(self) -> list[Row]:
        """A chain and a tree, each of `nodes` nodes and grown in as many levels of one leaf."""
        nodes, rows = self.engine.config.nodes, list[Row]()
        for temperature in TEMPERATURES:
            chain, tree = (
                self.play(partial(self._narrow, children), f"{self.name}, {shape}", nodes, temperature)
                for shape, children in (("chain", 1), ("tree", 4))
            )
            found = {shape: row["tokens_per_verify_step"] for shape, row in (("chain", chain), ("tree", tree))}
            rows.append(
                {"draft": self.name, "temperature": temperature, **found, "ratio": found["tree"] / found["chain"]}
            )
        return rows

    def _narrow(self, children: int) -> LMDrafter:
        return self.engine.drafters.make_lm(1, children)


def paced(options: BenchOptions, draft: Path, prompts: Sequence[Prompt], progress: ProgressBar) -> list[Row]:
    """Speeds of one stream, beside a target whose steps take `target_ms` and with levels as slow as they are here. The
    budget spends what pays."""
    rows = list[Row]()
    with Engine(options.engine_config(draft=draft, pace=f"target={options.target_ms:g}ms")) as engine:
        contestants = {OFF: PLAIN, draft.name: contestant_of(engine)}
        for temperature in TEMPERATURES:
            jobs = jobs_at(prompts, temperature, options.max_tokens)
            rounds = compete(engine, contestants, [[job] for job in (jobs[0], *jobs)], 1, progress)
            rows.append({"draft": draft.name, "temperature": temperature, **speed_of(draft.name, rounds)})
    return rows


def run_heads(options: BenchOptions, progress: ProgressBar) -> Report:
    """The cost of each draft's level is measured first; then each has as many levels as take `draft_ms` together, one
    at least. N-grams cost nothing."""
    prompts, drafts = options.rows(), options.compared_drafts()
    at_temperatures = PLAYED * len(prompts) + 2 * (len(prompts[:PACED]) + 1)
    per_draft = len(prompts[:TIMED]) + len(TEMPERATURES) * at_temperatures
    progress.total = len(drafts) * per_draft + len(TEMPERATURES) * len(prompts)
    costs, rows, shapes, speeds = dict[str, float](), list[Row](), list[Row](), list[Row]()
    for place, draft in enumerate(drafts):
        with Engine(options.engine_config(draft=draft)) as engine:
            ground = Ground(engine, draft.name, prompts, options, progress)
            costs[draft.name] = ground.level_ms()
            rows += ground.at_equal_cost(max(1, int(options.draft_ms / costs[draft.name])))
            shapes += ground.shapes()
            if not place:
                rows += [ground.play(NgramDrafter, "ngram", 1, temperature) for temperature in TEMPERATURES]
        speeds += paced(options, draft, prompts[:PACED], progress)
    return Report({"level_ms": costs, "equal_cost": rows, "shapes": shapes, "paced": speeds})
