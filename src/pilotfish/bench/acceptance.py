"""How many tokens a verify step commits, and how far down trees are right. No timing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

from pilotfish.bench.compare import Spread, distinct_ngrams
from pilotfish.bench.drafters import Bench
from pilotfish.bench.report import print_table
from pilotfish.bench.workload import TEMPERATURES, Prompt, jobs_at
from pilotfish.config import EngineConfig
from pilotfish.engine.sample import Sample

DRAFTERS = ("lm", "lm+ngram", "ngram")
CONCURRENCY = 8


@dataclass(frozen=True)
class Acceptance:
    """One drafter at one temperature. Depth d is at index d - 1."""

    drafter: str
    temperature: float
    tokens: int
    verify_steps: int
    tokens_per_verify_step: float
    by_prompt: Spread
    acceptance_by_depth: list[float]
    accepted_by_origin: dict[str, int]
    distinct_4grams: float


@dataclass(frozen=True)
class AcceptanceReport:
    """All drafters, and the tree they grew."""

    prompts: int
    max_tokens: int
    dtype: str
    quantization: str
    nodes: int
    levels: int
    width: int
    results: list[Acceptance]


def run_acceptance(
    config: EngineConfig, prompts: list[Prompt], max_tokens: int, done: Callable[[str], None] = lambda _: None
) -> AcceptanceReport:
    """`done` is called with a label for each sequence."""
    bench, results = Bench(config), []
    for temperature in TEMPERATURES:
        jobs = jobs_at(prompts, temperature, max_tokens)
        for name in DRAFTERS:
            label = f"{name}, T={temperature:g}"
            samples = bench.run(bench.drafter(name), jobs, CONCURRENCY, partial(done, label))
            results.append(acceptance(name, temperature, samples))
    shape = (config.nodes, config.levels, config.width)
    return AcceptanceReport(len(prompts), max_tokens, config.dtype, config.quantization, *shape, results)


def num_sequences(num_prompts: int) -> int:
    """How many sequences `run_acceptance` generates."""
    return num_prompts * len(TEMPERATURES) * len(DRAFTERS)


def acceptance(drafter: str, temperature: float, samples: Sequence[Sample]) -> Acceptance:
    """Over all steps of all samples; `by_prompt` is the spread of the samples' own means."""
    tokens = sum(len(sample.token_ids) for sample in samples)
    steps = sum(sample.request.stats.verify_steps for sample in samples)
    return Acceptance(
        drafter=drafter,
        temperature=temperature,
        tokens=tokens,
        verify_steps=steps,
        tokens_per_verify_step=tokens / steps,
        by_prompt=Spread.of([sample.stats()["tokens_per_verify_step"] for sample in samples]),
        acceptance_by_depth=acceptance_by_depth(samples),
        accepted_by_origin=accepted_by_origin(samples),
        distinct_4grams=distinct_ngrams([sample.token_ids for sample in samples]),
    )


def acceptance_by_depth(samples: Sequence[Sample]) -> list[float]:
    """Of the steps whose tree reached a depth, the share that accepted a token there."""
    offered = _totals([sample.request.stats.offered_by_depth for sample in samples])
    accepted = _totals([sample.request.stats.accepted_by_depth for sample in samples])
    return [a / o for a, o in zip(accepted, offered, strict=True)]


def accepted_by_origin(samples: Sequence[Sample]) -> dict[str, int]:
    """Accepted tokens by who guessed them."""
    return dict(sum((Counter(sample.request.stats.accepted_by_origin) for sample in samples), Counter[str]()))


def _totals(counts: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def print_acceptance(report: AcceptanceReport) -> None:
    title = f"{report.nodes} nodes, up to {report.levels} levels of {report.width} leaves, {report.prompts} prompts"
    header = ("drafter", "T", "tokens/verify step", "by prompt", "distinct 4-grams", "accepted", "acceptance by depth")
    print_table(title, header, map(_row, report.results))


def _row(result: Acceptance) -> tuple[object, ...]:
    depths = " ".join(f"{share:.2f}" for share in result.acceptance_by_depth[:8])
    mean = f"{result.tokens_per_verify_step:.2f}"
    accepted = ", ".join(f"{name} {count}" for name, count in result.accepted_by_origin.items())
    distinct = f"{result.distinct_4grams:.2f}"
    return result.drafter, f"{result.temperature:g}", mean, result.by_prompt, distinct, accepted, depths
