"""How sure a small model must be to answer in place of a large one: `threshold` of a cascade's file, from tasks whose
success can be judged."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pilotfish.cli.bench.contestants import Run, contestant_of
from pilotfish.cli.bench.options import BenchOptions
from pilotfish.cli.bench.provenance import write_toml
from pilotfish.cli.bench.report import ProgressBar, Report, Row
from pilotfish.cli.bench.tasks.sandbox import Sandbox
from pilotfish.cli.bench.tasks.success import Asked, asked_tasks, chosen_tasks, failure_of
from pilotfish.cli.bench.tasks.tasks import Judge, validator
from pilotfish.cli.bench.tasks.thresholds import CascadedTask, chosen, halves, outcome, outcomes
from pilotfish.config.engine import EngineConfig
from pilotfish.core.drafting.vocabulary import why_ids_differ
from pilotfish.engine.engine import Engine
from pilotfish.errors import ModelError, ParameterError
from pilotfish.model.loading.metadata import load_tokenizer
from pilotfish.operate.cascade_policy import LEAST, Confidence

#: Sides, and a task that each has in common.
SIDES = ("small", "large")


@dataclass(frozen=True)
class CascadeRuns:
    small: Run
    large: Run


def run_cascade(options: BenchOptions, progress: ProgressBar) -> Report:
    """Both models generate all tasks alone, plainly, one after the other; then the outputs are judged."""
    if options.target is not None and options.small is None:
        raise ParameterError("small", None, "--target and --small together")
    tasks = chosen_tasks(options)
    validator()  # before hours of work, not after
    large = options.engine_config(mode="off")
    small = large.of_small(options.small or options.models().draft, kv_slots=large.kv_slots)
    tokenizer = load_tokenizer(large.target)
    if (reason := why_ids_differ(tokenizer, load_tokenizer(small.target))) is not None:
        raise ModelError(f"small: {small.target} reads prompts otherwise: {reason}")
    judge = Judge(tokenizer, Sandbox() if options.allow_code_execution else None)
    asked = [scored(one) for one in asked_tasks(tasks, judge, options)]
    progress.total = len(SIDES) * len(asked)
    runs = CascadeRuns(*(_run(config, asked, options, progress) for config in (small, large)))
    report = report_of(judged(asked, runs, judge, options.tokens), options)
    rows: list[Row] = [{"category": each.category, "task": each.task.id} for each in asked]
    for i, row in enumerate(rows):
        row |= {f"{side}_tokens": len(getattr(runs, side).outputs[i]) for side in SIDES}
    return replace(report, results={**report.results, "small": str(small.target), "outputs": rows}, unshown=["outputs"])


def scored(asked: Asked) -> Asked:
    return replace(asked, job=replace(asked.job, params=replace(asked.job.params, logprobs=0)))


def _run(config: EngineConfig, asked: Sequence[Asked], options: BenchOptions, progress: ProgressBar) -> Run:
    done = partial(progress, f"{config.target.name}, {options.concurrency} at a time")
    with Engine(config) as engine:
        run = contestant_of(engine).run(engine, [each.job for each in asked], options.concurrency, done)
    gc.collect()  # the next model may need its memory
    return run


def judged(asked: Sequence[Asked], runs: CascadeRuns, judge: Judge, tokens: int) -> list[CascadedTask]:
    found = []
    for i, each in enumerate(asked):
        small, large = (not failure_of(each, run.texts[i], run.ends[i], judge) for run in (runs.small, runs.large))
        found.append(CascadedTask(each.category, confidence_of(runs.small.logprobs[i], tokens), small, large))
    return found


def confidence_of(logprobs: Sequence[float], tokens: int) -> float:
    """As the server has it."""
    confidence = Confidence(1, tokens, LEAST)
    confidence.add(0, logprobs, ended=True)
    assert confidence.value is not None  # as of every output that has ended
    return confidence.value


def report_of(tasks: Sequence[CascadedTask], options: BenchOptions) -> Report:
    """ParameterError for tasks that cannot be halved, and for a file that cannot be written."""
    choosing, judging = halves(tasks)
    if not judging:
        raise ParameterError("each", options.each, "two tasks of a category at least: half of them choose")
    found = outcomes(choosing)
    best = chosen(found, options.loss)
    honest = outcome(judging, best.threshold)
    results: dict[str, Any] = {
        "thresholds": [one.row() for one in found],
        "chosen": best.row(),
        "on_the_other_half": honest.row(),
        "categories": category_rows(judging, best.threshold),
    }
    if options.save is not None:
        said = (
            f"on {honest.tasks} other tasks the small model answers {honest.answered_by_small:.1%};"
            f" {honest.success:.1%} succeed, {honest.large_success:.1%} with the large model alone"
        )
        write_toml(said, {"threshold": best.threshold, "tokens": options.tokens}, options.save)
    return Report(results)


def category_rows(tasks: Sequence[CascadedTask], threshold: float) -> list[Row]:
    own = {name: [task for task in tasks if task.category == name] for name in dict.fromkeys(t.category for t in tasks)}
    return [{"category": name, **outcome(each, threshold).row()} for name, each in own.items()]
