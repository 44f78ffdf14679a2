"""Lossless or not: every drafter's tokens against those of the target alone, by ==."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from pilotfish.bench.compare import first_difference
from pilotfish.bench.drafters import Bench, RandomDrafter
from pilotfish.bench.report import print_table
from pilotfish.bench.workload import PARITY_SETTINGS, Job, Prompt, mixed_jobs
from pilotfish.config import EngineConfig
from pilotfish.core.drafter import Drafter
from pilotfish.engine.engine import Sample

BATCH = 8
LM_NODES = (4, 16, 48)
RANDOM_NODES = 24
COMBINATIONS = ("ngram", "suffix", "lm+ngram", "lm+suffix", "lm+ngram+suffix")
#: Of all runs: what has ended before is what suffix drafters guess from.
SALT = "parity"
#: Outputs of one run, in order of its jobs.
Outputs = list[list[int]]


@dataclass(frozen=True)
class Outcome:
    """One drafter at one concurrency and thread count, against `off` alone at that thread count.

    `verified` counts the nodes of all trees, `accepted` those on accepted paths: a drafter that offers
    nothing is equal and shows nothing.
    """

    threads: int
    drafter: str
    concurrency: int
    compared: int
    differing: int
    verified: int
    accepted: int
    seconds: float

    @property
    def vacuous(self) -> bool:
        return self.verified == 0 and self.drafter != "off"


@dataclass(frozen=True)
class Difference:
    """One unequal sequence. `index` counts output tokens."""

    threads: int
    drafter: str
    concurrency: int
    prompt: str
    setting: str
    index: int


@dataclass(frozen=True)
class ParityReport:
    """All outcomes. `across_threads` compares `off` alone with itself at the first thread count."""

    dtype: str
    prompts: int
    max_tokens: int
    outcomes: list[Outcome]
    across_threads: list[Outcome]
    differences: list[Difference]
    seconds: float

    @property
    def compared(self) -> int:
        return sum(outcome.compared for outcome in self.outcomes)

    @property
    def differing(self) -> int:
        return sum(outcome.differing for outcome in self.outcomes)

    @property
    def failed(self) -> bool:
        """Float32 promises equality, shown on trees; of lower precision only the match rate is published."""
        unproved = self.differing > 0 or any(outcome.vacuous for outcome in self.outcomes)
        return self.dtype == "float32" and unproved


def contestants(bench: Bench) -> dict[str, Drafter]:
    """Every drafter that is compared, over the models that `bench` has loaded."""
    vocab_size = bench.engine.model.shape.vocab_size
    trees = {f"lm {nodes}": bench.lm(nodes) for nodes in LM_NODES}
    plain = {name: bench.drafter(name) for name in ("off", *COMBINATIONS)}
    return {**plain, **trees, "random": RandomDrafter(vocab_size, RANDOM_NODES)}


def runs() -> list[tuple[str, int]]:
    """(drafter, concurrency) in order; the reference first, batched runs, which are quicker, next."""
    names = ["off", *(f"lm {nodes}" for nodes in LM_NODES), *COMBINATIONS, "random"]
    return [("off", 1), *((name, BATCH) for name in names), *((name, 1) for name in names[1:])]


def num_sequences(num_prompts: int, thread_counts: Sequence[int]) -> int:
    """How many sequences `run_parity` generates."""
    return len(thread_counts) * len(runs()) * len(PARITY_SETTINGS) * num_prompts


def run_parity(
    config: EngineConfig,
    prompts: list[Prompt],
    max_tokens: int,
    thread_counts: Sequence[int],
    done: Callable[[str], None] = lambda _: None,
) -> ParityReport:
    """Models are loaded once per thread count. `done` is called with a label for each sequence."""
    began = time.perf_counter()
    jobs = mixed_jobs(prompts, PARITY_SETTINGS, max_tokens)
    outcomes: list[Outcome] = []
    across: list[Outcome] = []
    differences: list[Difference] = []
    references: list[Outputs] = []
    for threads in thread_counts:
        bench = Bench(dataclasses.replace(config, threads=threads))
        generated = _runs(bench, jobs, threads, done)
        reference = next(generated)
        references.append(reference.outputs)
        across.append(_outcome(threads, reference, references[0]))
        for run in generated:
            outcomes.append(_outcome(threads, run, reference.outputs))
            differences.extend(_differences(threads, run, reference.outputs, jobs))
    seconds = time.perf_counter() - began
    return ParityReport(config.dtype, len(prompts), max_tokens, outcomes, across[1:], differences, seconds)


@dataclass(frozen=True)
class _Run:
    drafter: str
    concurrency: int
    samples: list[Sample]
    seconds: float

    @property
    def outputs(self) -> Outputs:
        return [sample.token_ids for sample in self.samples]


def _runs(bench: Bench, jobs: list[Job], threads: int, done: Callable[[str], None]) -> Iterator[_Run]:
    drafters = contestants(bench)
    for name, concurrency in runs():
        label = f"{name}, {concurrency} at a time, {threads} thread{'s' if threads > 1 else ''}"
        began = time.perf_counter()
        samples = bench.run(drafters[name], jobs, concurrency, partial(done, label), SALT)
        yield _Run(name, concurrency, samples, time.perf_counter() - began)


def _outcome(threads: int, run: _Run, reference: Outputs) -> Outcome:
    differing = sum(a != b for a, b in zip(run.outputs, reference, strict=True))
    stats = [sample.request.stats for sample in run.samples]
    return Outcome(
        threads=threads,
        drafter=run.drafter,
        concurrency=run.concurrency,
        compared=len(reference),
        differing=differing,
        verified=sum(one.draft_tokens for one in stats),
        accepted=sum(one.accepted_tokens for one in stats),
        seconds=run.seconds,
    )


def _differences(threads: int, run: _Run, reference: Outputs, jobs: list[Job]) -> Iterator[Difference]:
    for job, left, right in zip(jobs, run.outputs, reference, strict=True):
        index = first_difference(left, right)
        if index is not None:
            yield Difference(threads, run.drafter, run.concurrency, job.prompt.id, job.setting, index)


def print_parity(report: ParityReport) -> None:
    """Compared and differing sequences of each run, and the first differences."""
    header = ("drafter", "at a time", "threads", "compared", "differing", "equal", "verified", "accepted", "seconds")
    print_table(f"against off alone, {report.dtype}", header, map(_row, report.outcomes))
    if report.across_threads:
        print_table("off alone, against off at the first thread count", header, map(_row, report.across_threads))
    if report.differences:
        rows = [dataclasses.astuple(difference) for difference in report.differences[:20]]
        print_table("first differences", ("threads", "drafter", "at a time", "prompt", "setting", "token"), rows)
    equal = 1 - report.differing / report.compared
    total = (report.compared, report.differing, f"{equal:.2%}", f"{report.seconds:.0f}")
    print_table("in all", ("compared", "differing", "equal", "seconds"), [total])


def _row(outcome: Outcome) -> tuple[object, ...]:
    counts = (outcome.drafter, outcome.concurrency, outcome.threads, outcome.compared, outcome.differing)
    equal = f"{1 - outcome.differing / outcome.compared:.2%}"
    return (*counts, equal, outcome.verified, outcome.accepted, f"{outcome.seconds:.0f}")
