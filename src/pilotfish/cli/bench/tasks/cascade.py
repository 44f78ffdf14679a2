"""How sure a small model must be to answer in place of a large one: a cascade's `threshold`, from judged tasks."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from pilotfish.cli.bench.contestants import Run
from pilotfish.cli.bench.options import BenchOptions
from pilotfish.cli.bench.report import ProgressBar, Report, write_toml
from pilotfish.cli.bench.tasks.success import Asked, asked_tasks, failures_of, run_tasks
from pilotfish.cli.bench.tasks.tasks import Judge
from pilotfish.core.drafting.vocabulary import why_ids_differ
from pilotfish.errors import ModelError, ParameterError
from pilotfish.model.loading.metadata import load_tokenizer
from pilotfish.operate.cascade_policy import LEAST, NOBODY, Confidence


def run_cascade(options: BenchOptions, progress: ProgressBar) -> Report:
    if options.target is not None and options.small is None:
        raise ParameterError("small", None, "--target and --small together")
    large = options.engine_config(mode="off")
    small = large.of_small(options.small or options.models().draft, kv_slots=large.kv_slots)
    asked, judge = asked_tasks(options)
    if (reason := why_ids_differ(judge.tokenizer, load_tokenizer(small.target))) is not None:
        raise ModelError(f"small: {small.target} reads prompts otherwise: {reason}")
    asked = [replace(one, job=replace(one.job, params=replace(one.job.params, logprobs=0))) for one in asked]
    progress.total = 2 * len(asked)
    runs = [run_tasks(config, asked, options, progress) for config in (small, large)]
    report = report_of(judged(asked, runs, judge, options.tokens), options)
    rows = [
        {"category": each.category, "task": each.task.id, "small_tokens": len(own), "large_tokens": len(other)}
        for each, own, other in zip(asked, *(run.outputs for run in runs), strict=True)
    ]
    return replace(report, results={**report.results, "small": str(small.target), "outputs": rows}, unshown=["outputs"])


def judged(asked: Sequence[Asked], runs: Sequence[Run], judge: Judge, tokens: int) -> "list[CascadedTask]":
    """`runs` are those of the small model and the large one."""
    successes = [[not why for why in failures_of(asked, run, judge)] for run in runs]
    sure = [confidence_of(logprobs, tokens) for logprobs in runs[0].logprobs]
    return [CascadedTask(one.category, *each) for one, *each in zip(asked, sure, *successes, strict=True)]


def confidence_of(logprobs: Sequence[float], tokens: int) -> float:
    """As the server has it."""
    confidence = Confidence(1, tokens, LEAST)
    confidence.add(0, logprobs, ended=True)
    assert confidence.value is not None  # as of every output that has ended
    return confidence.value


def report_of(tasks: "Sequence[CascadedTask]", options: BenchOptions) -> Report:
    """ParameterError for tasks that cannot be halved, and for a file that cannot be written."""
    choosing, judging = halves(tasks)
    if not judging:
        raise ParameterError("each", options.each, "two tasks of a category at least: half of them choose")
    found = outcomes(choosing)
    best = chosen(found, options.loss)
    honest = outcome(judging, best.threshold)
    named = {task.category: [one for one in judging if one.category == task.category] for task in judging}
    results: dict[str, Any] = {
        "thresholds": [vars(one) for one in found],
        "chosen": vars(best),
        "on_the_other_half": vars(honest),
        "categories": [{"category": name, **vars(outcome(own, best.threshold))} for name, own in named.items()],
    }
    if options.save is not None:
        said = (
            f"on {honest.tasks} other tasks the small model answers {honest.answered_by_small:.1%};"
            f" {honest.success:.1%} succeed, {honest.large_success:.1%} with the large model alone"
        )
        write_toml(said, {"threshold": best.threshold, "tokens": options.tokens}, options.save)
    return Report(results)


#: Thresholds are rounded down to so many parts of 1.
STEPS = 10_000
#: A share that is too low by less is not.
ROUNDING = 1e-9


@dataclass(frozen=True)
class CascadedTask:
    """A task that both models did, and how sure the small one was."""

    category: str
    confidence: float  # mean log-probability of its first tokens
    small: bool  # whether its output succeeded
    large: bool


@dataclass(frozen=True)
class CascadeOutcome:
    threshold: float
    answered_by_small: float  # share of the tasks
    success: float  # likewise, of the cascade
    small_success: float  # of the small model alone
    large_success: float
    tasks: int


def outcome(tasks: Sequence[CascadedTask], threshold: float) -> CascadeOutcome:
    stays = [task.confidence >= threshold for task in tasks]
    successes = [task.small if stay else task.large for task, stay in zip(tasks, stays, strict=True)]
    small, large = (fmean(getattr(task, side) for task in tasks) for side in ("small", "large"))
    return CascadeOutcome(threshold, fmean(stays), fmean(successes), small, large, len(tasks))


def outcomes(tasks: Sequence[CascadedTask]) -> list[CascadeOutcome]:
    """Of every threshold that matters, ascending: the small model answers all at the first, nothing at the last."""
    found = {math.floor(task.confidence * STEPS) / STEPS for task in tasks}
    return [outcome(tasks, threshold) for threshold in (*sorted(found), NOBODY)]


def chosen(found: Sequence[CascadeOutcome], loss: float) -> CascadeOutcome:
    """The lowest threshold whose success is that of the large model less `loss` or more."""
    return next(one for one in found if one.success >= one.large_success - loss - ROUNDING)


def halves(tasks: Sequence[CascadedTask]) -> tuple[list[CascadedTask], list[CascadedTask]]:
    """Tasks of each category in turn: those to choose by, and those to judge by."""
    counts, choosing, judging = defaultdict[str, int](int), list[CascadedTask](), list[CascadedTask]()
    for task in tasks:
        (judging if counts[task.category] % 2 else choosing).append(task)
        counts[task.category] += 1
    return choosing, judging
