"""Cost of a step's parts and of forwards by their rows; int8 weights beside plain ones; memory beside its plan."""

from __future__ import annotations

import gc
import statistics
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product

import numpy as np
import torch

from pilotfish.bench.acceptance import ACCEPTANCE_CONCURRENCY
from pilotfish.bench.contestants import Contestant, Run, always, drafting, every_round, take_turns
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.report import ProgressBar, Report, Row, equal_share, timed
from pilotfish.bench.workload import TEMPERATURES, Job, Prompt, jobs_at
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.budget import FixedBudget
from pilotfish.core.scheduling.executor import NO_NODES, NodeRows, SequenceRows
from pilotfish.core.trees.tree import OTHER, Guesses
from pilotfish.engine.engine import Engine
from pilotfish.engine.memory import anonymous_memory, gib
from pilotfish.model.executor import TorchExecutor

CONTEXT = 256
WARM_UP = 3  # forwards


def interleaved_ms(executors: Mapping[str, TorchExecutor], rows: int, repeats: int) -> dict[str, float]:
    """Median of each executor's forward of `context_and_tree`. They take turns: what else the machine does meanwhile
    slows them alike."""
    forwards = {name: partial(executor.forward, [step_rows(executor, rows)]) for name, executor in executors.items()}
    calls = {name: every_round(partial(timed, forward)) for name, forward in forwards.items()}
    times = take_turns(calls, range(WARM_UP + repeats), WARM_UP)
    return {name: 1000 * statistics.median(seconds) for name, seconds in times.items()}


def step_rows(executor: TorchExecutor, rows: int) -> SequenceRows:
    """The step of `context_and_tree`, whose context this computes."""
    before, step = context_and_tree(rows, executor.model.config.vocab_size)
    executor.forward([before])
    return step


def context_and_tree(rows: int, vocab_size: int) -> tuple[SequenceRows, SequenceRows]:
    """`CONTEXT` tokens; then a token and a tree below it, `rows` together. Slots count up from 0."""
    prefix = np.arange(CONTEXT + 1, dtype=np.int32)
    prompt = [1 + token % (vocab_size - 1) for token in range(CONTEXT + 1)]
    tree = Guesses()
    for node in range(rows - 1):
        tree.add(node // 4 - 1, (node + 1) % vocab_size, -float(node + 1))
    nodes = NodeRows.of(tree.tree(), np.arange(CONTEXT + 1, CONTEXT + rows, dtype=np.int32))
    before = SequenceRows(0, prompt[:CONTEXT], prefix[:CONTEXT], NO_NODES, kept=[CONTEXT - 1])
    return before, SequenceRows(CONTEXT, prompt[CONTEXT:], prefix, nodes, kept=[0])


# -- profile

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


def run_profile(options: BenchOptions, progress: ProgressBar) -> Report:
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
    forward_ms = {rows: interleaved_ms({"": target}, rows, options.repeats)[""] for rows in PROFILE_ROWS}
    draft_ms = interleaved_ms({"": draft}, engine.config.width, options.repeats)[""]
    return Report({"steps": steps, "forward_ms": forward_ms, "draft_forward_ms": draft_ms})


def step_parts(run: Run) -> Row:
    """Mean milliseconds of a step, and of its parts; `text` is all that is outside the worker's step. `runtime_share`
    is that of RUNTIME."""
    parts = {name: run.spent(*moments) for name, moments in PARTS.items()}
    parts["text"] = run.seconds - sum(parts.values())
    steps, runtime = len(run.steps), sum(parts[name] for name in RUNTIME) / run.seconds
    milliseconds = {name: 1000 * part / steps for name, part in parts.items()}
    return {"steps": steps, "ms": 1000 * run.seconds / steps, **milliseconds, "runtime_share": runtime}


# -- quantization

QUANTIZATIONS = ("none", "int8")
QUANTIZATION_ROWS = (1, 8, 16)
CHUNK = 64  # tokens that one forward scores


def run_quantization(options: BenchOptions, progress: ProgressBar) -> Report:
    """Measures each forward `repeats` times."""
    prompts = options.rows()
    progress.total = len(prompts) * len(TEMPERATURES) * len(QUANTIZATIONS) ** 2
    engines = {name: Engine(options.engine_config(quantization=name)) for name in QUANTIZATIONS}
    texts = [engines["none"].check_prompt(prompt.text) for prompt in prompts]
    targets = {name: engine.executor for name, engine in engines.items()}
    drafts = {name: engine.drafters.draft_executor for name, engine in engines.items()}
    models = [
        {"model": model, **row}
        for model, executors in (("target", targets), ("draft", drafts))
        for row in compare_models(executors, texts, options.repeats)
    ]
    results = list[Row]()
    for temperature in TEMPERATURES:
        jobs = jobs_at(prompts, temperature, options.max_tokens)
        results += compare_pairs(engines, jobs, temperature, progress)
    scored = sum(len(text) - 1 for text in texts)
    return Report({"models": models, "pairs": results, "scored_tokens": scored})


def compare_models(executors: Mapping[str, TorchExecutor], texts: Sequence[Sequence[int]], repeats: int) -> list[Row]:
    """A model in every quantization, scored on the texts' own tokens: nats a token, and the share of positions whose
    likeliest token is that of plain weights."""
    times = {rows: interleaved_ms(executors, rows, repeats) for rows in QUANTIZATION_ROWS}
    _, plain = score(executors["none"], texts)
    results = list[Row]()
    for name, executor in executors.items():
        losses, likeliest = score(executor, texts)
        agreement = (likeliest == plain).float().mean().item()
        forward_ms = {rows: times[rows][name] for rows in QUANTIZATION_ROWS}
        scores = {"loss": losses.mean().item(), "agreement": agreement}
        results.append({"quantization": name, **scores, "forward_ms": forward_ms})
    return results


def score(executor: TorchExecutor, texts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of every token after the first of each text, and the likeliest token there. float32, int64 [positions]."""
    losses, likeliest = zip(*(part for text in texts for part in _score_text(executor, text)), strict=True)
    return torch.cat(losses), torch.cat(likeliest)


def _score_text(executor: TorchExecutor, tokens: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for logits, following in logits_along(executor, tokens):
        yield torch.nn.functional.cross_entropy(logits, following, reduction="none"), logits.argmax(dim=-1)


def logits_along(executor: TorchExecutor, tokens: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Logits after each token but the last, float32 [chunk, vocab], and the tokens that follow, int64 [chunk]. A chunk
    is a committed token and a chain of nodes below it, since nodes give their logits."""
    slots = np.arange(len(tokens), dtype=np.int32)
    for first in range(0, len(tokens) - 1, CHUNK):
        chunk, following = tokens[first : first + CHUNK], torch.tensor(tokens[first + 1 : first + CHUNK + 1])
        chain = Guesses.chain(chunk[1:], [0.0] * (len(chunk) - 1), OTHER).tree()
        nodes = NodeRows.of(chain, slots[first + 1 : first + len(chunk)])
        rows = SequenceRows(first, chunk[:1], slots[: first + 1], nodes, kept=[0])
        logits = executor.forward([rows])[: len(following)]
        yield logits, following.to(logits.device)


def compare_pairs(
    engines: Mapping[str, Engine], jobs: Sequence[Job], temperature: float, progress: ProgressBar
) -> list[Row]:
    """Runs every target with every draft; the pair of plain weights comes first."""
    results, plain = list[Row](), list[list[int]]()
    for target, draft in product(QUANTIZATIONS, repeat=2):
        done = partial(progress, f"target {target}, draft {draft}, T={temperature:g}")
        run = drafting(engines[draft], "lm").run(engines[target], jobs, ACCEPTANCE_CONCURRENCY, done)
        plain = plain or run.outputs
        where = {"target": target, "draft": draft, "temperature": temperature}
        figures = {"tokens_per_verify_step": run.tokens / run.total("verify_steps")}
        results.append({**where, **figures, "equal_outputs": equal_share(run.outputs, plain)})
    return results


# -- memory

SAMPLED_EVERY = 0.001  # seconds
NEW_TOKENS = 8


@contextmanager
def sampled_peak() -> Iterator[list[int]]:
    """A thread samples the memory of this process meanwhile; the item is the largest sample."""
    peak, over = [0], threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLED_EVERY):
            peak[0] = max(peak[0], anonymous_memory())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        over.set()
        thread.join()


def run_memory(options: BenchOptions, progress: ProgressBar) -> Report:
    """Fill the pool with random prompts, all sampled with all filters. Right only in a fresh process."""
    config = options.engine_config()
    progress.total = config.max_requests
    with sampled_peak() as peak:
        engine = Engine(config)
        gc.collect()
        loaded = anonymous_memory()
        contestant = Contestant(always(engine.drafter), partial(FixedBudget, config.nodes, config.levels))
        run = contestant.run(engine, filling(engine), config.max_requests, partial(progress, "filling"))
    plan = engine.memory
    planned = {
        "runtime": plan.runtime,
        "weights": plan.weights,
        f"{plan.slots} KV slots": plan.slots * plan.slot,
        f"workspace of {plan.max_rows} rows": plan.workspace,
        "planned": plan.total,
        "measured peak": peak[0],
    }
    results = {
        "plan": [{"part": name, "GiB": gib(size)} for name, size in planned.items()],
        "total": plan.total,
        "loaded": loaded,
        "peak": peak[0],
        "deviation": peak[0] / plan.total - 1,
        "draft_in_slots": plan.draft_in_slots,
        "requests": len(run.outputs),
        "preemptions": run.total("preemptions"),
    }
    return Report(results)


def filling(engine: Engine) -> list[Job]:
    """Requests that together need all slots, and every buffer that sampling may need."""
    slots, count = engine.memory.slots, engine.config.max_requests
    length = min(slots // count, engine.model.config.context) - NEW_TOKENS
    rng, vocab_size = np.random.default_rng(0), engine.model.config.vocab_size
    filters = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.01, "frequency_penalty": 0.1}
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, **filters)  # type: ignore[arg-type]
    prompts = [Prompt(str(i), rng.integers(0, vocab_size, length).tolist()) for i in range(count)]
    return [Job(prompt, "all filters", params) for prompt in prompts]
