"""Cost of a step's parts, and of forwards by their rows."""

from functools import partial
from itertools import product

from harness import PAIR, TEMPERATURES, Options, run

from pilotfish.cli.bench.contestants import Run, drafting
from pilotfish.cli.bench.report import ProgressBar, Report, Row
from pilotfish.cli.bench.workload import jobs_at
from pilotfish.engine.engine import Engine
from pilotfish.engine.trial import forward_seconds

PROFILE_DRAFTERS = ("off", "lm", "lm+ngram")
PROFILE_ROWS = (1, 4, 8, 16, 32, 64)
#: Parts of a StepRecord by what they are called here.
PARTS = {
    "draft": ("draft",),
    "schedule": ("plan", "schedule"),
    **{name: (name,) for name in ("rows", "forward", "verify")},
    "commit": ("send",),
}
#: Neither model nor sampling.
RUNTIME = ("schedule", "rows", "commit", "text")


def run_profile(options: Options, progress: ProgressBar) -> Report:
    """Runs all prompts, one at a time, and each forward `repeats` times; the draft's has `width` rows."""
    engine, prompts, steps = Engine(options.engine_config()), options.rows(), list[Row]()
    progress.total = len(prompts) * len(TEMPERATURES) * len(PROFILE_DRAFTERS)
    for temperature, drafter in product(TEMPERATURES, PROFILE_DRAFTERS):
        jobs = jobs_at(prompts, temperature, options.max_tokens)
        contestant = drafting(engine, drafter)
        contestant.run(engine, jobs[:1], 1)  # to warm up
        run = contestant.run(engine, jobs, 1, partial(progress, f"{drafter}, T={temperature:g}"))
        steps.append({"drafter": drafter, "temperature": temperature, **step_parts(run)})
    target, draft = engine.executor, engine.drafters.draft_executor
    forward_ms = {rows: 1000 * forward_seconds(target, rows) for rows in PROFILE_ROWS}
    draft_ms = 1000 * forward_seconds(draft, engine.config.width)
    return Report({"steps": steps, "forward_ms": forward_ms, "draft_forward_ms": draft_ms})


def step_parts(run: Run) -> Row:
    """Mean milliseconds of a step, and of its parts; `text` is all that is outside the worker's step. `runtime_share`
    is that of RUNTIME."""
    parts = {name: run.spent(*moments) for name, moments in PARTS.items()}
    parts["text"] = run.seconds - sum(parts.values())
    steps, runtime = len(run.steps), sum(parts[name] for name in RUNTIME) / run.seconds
    milliseconds = {name: 1000 * part / steps for name, part in parts.items()}
    return {"steps": steps, "ms": 1000 * run.seconds / steps, **milliseconds, "runtime_share": runtime}


if __name__ == "__main__":
    run(run_profile, *PAIR, "nodes", "levels", "width", "quantization", threads=2, repeats=20)
