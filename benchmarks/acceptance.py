"""The tokens that a verify step commits, by drafter and temperature. Times nothing."""

from functools import partial
from itertools import product

from harness import PAIR, TEMPERATURES, Options, run

from pilotfish.cli.bench.contestants import Run, drafting
from pilotfish.cli.bench.report import ProgressBar, Report, Row, Spread, distinct_ngrams
from pilotfish.cli.bench.workload import jobs_at
from pilotfish.engine.engine import Engine

ACCEPTANCE_DRAFTERS = ("lm", "lm+ngram", "ngram")
ACCEPTANCE_CONCURRENCY = 8


def run_acceptance(options: Options, progress: ProgressBar) -> Report:
    engine, prompts, results = Engine(options.engine_config()), options.rows(), list[Row]()
    progress.total = len(prompts) * len(TEMPERATURES) * len(ACCEPTANCE_DRAFTERS)
    for temperature, name in product(TEMPERATURES, ACCEPTANCE_DRAFTERS):
        jobs = jobs_at(prompts, temperature, options.max_tokens)
        done = partial(progress, f"{name}, T={temperature:g}")
        run = drafting(engine, name).run(engine, jobs, ACCEPTANCE_CONCURRENCY, done)
        results.append({"drafter": name, "temperature": temperature, **acceptance(run)})
    return Report({"results": results})


def acceptance(run: Run) -> Row:
    """Figures over all steps of all outputs. `by_prompt` is the spread of the outputs' own means; depth d is at index d
    - 1: of the steps whose tree reached it, the share that accepted a token there."""
    steps = run.total("verify_steps")
    by_prompt = [len(output) / one.verify_steps for output, one in zip(run.outputs, run.stats, strict=True)]
    offered, accepted = run.by_depth("offered_by_depth"), run.by_depth("accepted_by_depth")
    return {
        "tokens": run.tokens,
        "verify_steps": steps,
        "tokens_per_verify_step": run.tokens / steps,
        "by_prompt": Spread.of(by_prompt),
        "acceptance_by_depth": [a / o for a, o in zip(accepted, offered, strict=True)],
        "accepted_by_origin": run.accepted_by_origin,
        "distinct_4grams": distinct_ngrams(run.outputs),
    }


if __name__ == "__main__":
    run(run_acceptance, *PAIR, "nodes", "levels", "width", "quantization", threads=2)
