"""Tokens per second of this engine and of transformers: same weights, precision, threads and prompts, in turn. And the
tokens that a verify step commits, without timing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from pilotfish.bench.contestants import Run, Timed, drafting, over, speed_of, take_turns
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.report import ProgressBar, Report, Row, Spread, distinct_ngrams
from pilotfish.bench.workload import TEMPERATURES, Job, jobs_at
from pilotfish.config.engine import EngineConfig
from pilotfish.engine.engine import Engine
from pilotfish.engine.memory import precision_here
from pilotfish.model.precision import library_dtype
from pilotfish.model.quantize import quantize

OURS = {"off": "off", "sync lm": "lm", "sync lm+ngram": "lm+ngram", "sync ngram": "ngram"}
LOOKUP = "transformers prompt lookup"  # greedy only
LOOKUP_TOKENS = 10
BEST = "transformers, better of plain and assisted"
#: Numerators by their denominator, round by round, where both took part.
RATIOS = {
    "off": ("sync lm", "sync lm+ngram", "sync ngram"),
    "transformers": ("off", "sync lm", "sync lm+ngram"),
    "transformers assisted": ("sync lm", "sync lm+ngram"),
    BEST: ("sync lm", "sync lm+ngram"),
    LOOKUP: ("sync ngram", "sync lm+ngram"),
}
ACCEPTANCE_DRAFTERS = ("lm", "lm+ngram", "ngram")
ACCEPTANCE_CONCURRENCY = 8


def run_speed(options: BenchOptions, progress: ProgressBar) -> Report:
    """Runs the first prompt to warm up, then `repeats` times every prompt with every contestant."""
    engine = Engine(options.engine_config())
    prompts, speeds, compared = options.rows(), list[Row](), list[Row]()
    for prompt in prompts:
        engine.check_prompt(prompt.text)
    contestants = load_contestants(engine)
    plan = [(prompts[0], 0), *((prompt, repeat) for repeat in range(options.repeats) for prompt in prompts)]
    progress.total = (2 * len(contestants) - 1) * len(plan)
    for temperature in TEMPERATURES:
        jobs = [prompt.job(temperature, options.max_tokens, offset=repeat) for prompt, repeat in plan]
        playing = {name: run for name, run in contestants.items() if temperature == 0 or name != LOOKUP}
        rounds = take_turns(playing, jobs, done=lambda name, t=temperature: progress(f"{name}, T={t:g}"))  # type: ignore[misc]
        speeds += [{"temperature": temperature, **speed_of(name, rounds)} for name in rounds]
        compared += [{"temperature": temperature, **row} for row in ratios_of(rounds)]
    theirs = library_dtype(engine.precision.dtype, engine.model.device)
    return Report({"transformers_dtype": str(theirs)[6:], "speeds": speeds, "ratios": compared})


def load_contestants(engine: Engine) -> dict[str, Callable[[Job], Run]]:
    """The engine with each of its drafters, and transformers over the same directories, precision (float32 in place of
    bfloat16 where PyTorch has no instructions for it) and threads."""
    config = engine.config
    assert config.draft is not None
    target, draft = _reference(config.target, config), _reference(config.draft, config)
    theirs = partial(_generate, target, engine.tokenizer)
    return {
        **{name: partial(_our_run, engine, drafter) for name, drafter in OURS.items()},
        "transformers": theirs,
        "transformers assisted": partial(theirs, assistant_model=draft),
        LOOKUP: partial(theirs, prompt_lookup_num_tokens=LOOKUP_TOKENS),
    }


def _reference(directory: Path, config: EngineConfig) -> Any:
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    dtype = library_dtype(precision_here(config, directory).dtype, torch.device(config.device))
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    if config.quantization != "none":  # the same weights for all
        quantize(module, config.quantization)
    return module


def _our_run(engine: Engine, drafter: str, job: Job) -> Run:
    run = drafting(engine, drafter).run(engine, [job], 1)
    return replace(run, steps=[])  # nobody compares their periods here


def _generate(model: Any, tokenizer: Any, job: Job, **options: Any) -> Run:
    """`generate` as its user has it: its own cache and attention, the plain distribution at this temperature without
    the filters that generate has by default. Like ours from the text to the last token."""
    params = job.params
    torch.manual_seed(params.seed or 0)
    sampling = {"do_sample": True, "temperature": params.temperature, "top_k": 0, "top_p": 1.0}
    lengths = {"max_new_tokens": params.max_tokens, "min_new_tokens": params.max_tokens}
    chosen = {**lengths, **(sampling if params.temperature else {"do_sample": False}), **options}
    began = time.perf_counter()
    ids = torch.tensor([tokenizer.encode(job.prompt.text)])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), **chosen)
    return Run(time.perf_counter() - began, [output[0, ids.shape[1] :].tolist()])


def ratios_of(rounds: Mapping[str, Sequence[Timed]]) -> list[Row]:
    turns = zip(rounds["transformers"], rounds["transformers assisted"], strict=True)
    best = [max(both, key=attrgetter("tokens_per_second")) for both in turns]
    known = {**rounds, BEST: best}
    pairs = [(above, below) for below, numerators in RATIOS.items() for above in numerators if below in known]
    return [{"numerator": above, "denominator": below, "ratio": over(above, below, known)} for above, below in pairs]


# -- acceptance


def run_acceptance(options: BenchOptions, progress: ProgressBar) -> Report:
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
