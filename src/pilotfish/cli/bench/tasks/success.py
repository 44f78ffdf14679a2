"""Task success with and without speculation, by category. Speculation may change what a step commits, and nothing else:
in float32 all modes give equal outputs, so that they succeed and fail alike."""

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

from pilotfish.cli.bench.contestants import Run, contestant_of
from pilotfish.cli.bench.options import BenchOptions
from pilotfish.cli.bench.report import ProgressBar, Report, Row
from pilotfish.cli.bench.tasks.sandbox import Sandbox
from pilotfish.cli.bench.tasks.tasks import Judge, Task, bundled_tasks, humaneval_tasks, validator
from pilotfish.cli.bench.workload import Job, parse_choices
from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import Mode
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import FinishReason
from pilotfish.engine.engine import Engine
from pilotfish.errors import ParameterError
from pilotfish.model.loading.metadata import load_tokenizer
from pilotfish.printable import one_line

CODE, HUMANEVAL = "code", "humaneval"
#: Characters of a reason.
MAX_REASON = 100


@dataclass(frozen=True)
class Asked:
    category: str
    task: Task
    job: Job


def run_eval(options: BenchOptions, progress: ProgressBar) -> Report:
    modes, (asked, judge) = parse_choices("modes", options.modes, get_args(Mode)), asked_tasks(options)
    progress.total = len(modes) * len(asked)
    runs = {mode: run_tasks(options.engine_config(mode=mode), asked, options, progress) for mode in modes}
    failures = {mode: failures_of(asked, run, judge) for mode, run in runs.items()}
    outcomes = [_outcome(i, each, runs, failures) for i, each in enumerate(asked)]
    unequal = sum(not row["equal"] for row in outcomes)
    names = dict.fromkeys(each.category for each in asked)
    results = {"categories": [_row(name, outcomes, runs) for name in names], "outcomes": outcomes, "unequal": unequal}
    if judge.sandbox is not None:
        results["programs_confined_to_their_directory"] = judge.sandbox.confines_files
    else:
        results["left_out"] = f"{CODE}: --allow-code-execution runs it"
    return Report(results, failed=options.precision == "float32" and unequal > 0)


def chosen_tasks(options: BenchOptions) -> dict[str, list[Task]]:
    """By category. Code is no task unless it may be run."""
    tasks = bundled_tasks()
    if not options.allow_code_execution:
        if options.humaneval:
            allowed = "--allow-code-execution with it: the model's programs are run"
            raise ParameterError("humaneval", options.humaneval, allowed)
        del tasks[CODE]
    if options.humaneval:
        tasks[HUMANEVAL] = humaneval_tasks(Path(options.humaneval))
    return {category: each[: options.each] for category, each in tasks.items()}


def asked_tasks(options: BenchOptions) -> tuple[list[Asked], Judge]:
    tasks = chosen_tasks(options)
    validator()  # before hours of work, not after
    sandbox = Sandbox() if options.allow_code_execution else None
    judge = Judge(load_tokenizer(options.engine_config().target), sandbox)
    asked = [Asked(category, task, _job(task, judge, options)) for category, each in tasks.items() for task in each]
    return asked, judge


def _job(task: Task, judge: Judge, options: BenchOptions) -> Job:
    prompt, own = task.asked(judge), task.params(judge)
    params = SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature, seed=prompt.seed, **own)
    return Job(prompt, f"T={options.temperature:g}", params)


def run_tasks(config: EngineConfig, asked: Sequence[Asked], options: BenchOptions, progress: ProgressBar) -> Run:
    done = partial(progress, f"{config.target.name}, {config.mode}, {options.concurrency} at a time")
    with Engine(config) as engine:
        run = contestant_of(engine).run(engine, [each.job for each in asked], options.concurrency, done)
    gc.collect()  # the next model may need its memory
    return run


def failures_of(asked: Sequence[Asked], run: Run, judge: Judge) -> list[str]:
    """Why each output is none, in one line; "" for a success."""
    return [_failure(*each, judge) for each in zip(asked, run.texts, run.ends, strict=True)]


def _failure(asked: Asked, text: str, end: str, judge: Judge) -> str:
    if end not in (FinishReason.STOP, FinishReason.LENGTH):
        return end
    why = asked.task.failure(text, judge)
    cut = "cut off; " if why and end == FinishReason.LENGTH else ""
    return one_line(cut + why)[:MAX_REASON]


def _row(category: str, outcomes: Sequence[Row], runs: Mapping[Mode, Run]) -> Row:
    own = [i for i, each in enumerate(outcomes) if each["category"] == category]
    row: Row = {"category": category, "tasks": len(own), "unequal": sum(not outcomes[i]["equal"] for i in own)}
    for mode, run in runs.items():
        successes, steps = sum(outcomes[i][mode] for i in own), sum(run.stats[i].verify_steps for i in own)
        row[f"{mode}_successes"], row[f"{mode}_success_rate"] = successes, successes / len(own)
        row[f"{mode}_tokens_per_verify_step"] = sum(len(run.outputs[i]) for i in own) / steps
    return row


def _outcome(i: int, asked: Asked, runs: Mapping[Mode, Run], failures: Mapping[Mode, Sequence[str]]) -> Row:
    """`reason` is that of the first mode that failed."""
    first, *others = runs.values()
    row: Row = {"category": asked.category, "task": asked.task.id, "tokens": len(first.outputs[i])}
    row["cut_off"] = first.ends[i] == FinishReason.LENGTH
    row["equal"] = all(other.outputs[i] == first.outputs[i] for other in others)
    row |= {mode: not failures[mode][i] for mode in runs}
    return {**row, "reason": next((failures[mode][i] for mode in runs if failures[mode][i]), "")}
