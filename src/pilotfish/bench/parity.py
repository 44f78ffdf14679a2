"""Lossless or not: every drafter's tokens against those of the target alone, by ==."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from pilotfish.bench.compare import first_difference
from pilotfish.bench.drafters import Bench, JobRunner, RandomDrafter
from pilotfish.bench.report import print_table
from pilotfish.bench.workload import PARITY_SETTINGS, Job, Prompt, mixed_jobs
from pilotfish.config import EngineConfig
from pilotfish.core.drafter import Drafter
from pilotfish.engine.sample import Sample

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
    nothing is equal and shows nothing, as does a scarce pool that nobody gave way in.
    """

    threads: int
    drafter: str
    concurrency: int
    compared: int
    differing: int
    verified: int
    accepted: int
    preemptions: int
    seconds: float

    @property
    def vacuous(self) -> bool:
        guessless = self.verified == 0 and not self.drafter.startswith("off")
        return guessless or (self.preemptions == 0 and "preempted" in self.drafter)


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


@dataclass(frozen=True)
class Contestant:
    """What is compared with `off` alone: a drafter of Bench.drafter, or random trees."""

    drafter: str
    concurrency: int
    nodes: int | None = None  # of a tree; None: as configured
    preempted: bool = False  # with a KV pool too small for its batch

    @property
    def name(self) -> str:
        nodes = f" {self.nodes}" if self.drafter == "lm" else ""
        return self.drafter + nodes + (", preempted" if self.preempted else "")

    def make(self, bench: Bench) -> Drafter:
        if self.drafter == "random":
            return RandomDrafter(bench.engine.model.shape.vocab_size, RANDOM_NODES)
        return bench.drafter(self.drafter)


def runs() -> list[Contestant]:
    """In order; the reference first, batched runs, which are quicker, next."""
    trees = [("lm", nodes) for nodes in LM_NODES] + [(name, None) for name in COMBINATIONS] + [("random", RANDOM_NODES)]
    return [
        Contestant("off", 1),
        Contestant("off", BATCH),
        *(Contestant(name, BATCH, nodes) for name, nodes in trees),
        Contestant("off", BATCH, preempted=True),
        Contestant("lm+ngram+suffix", BATCH, preempted=True),
        *(Contestant(name, 1, nodes) for name, nodes in trees),
    ]


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
        generated = (run_contestant(one, bench, one.make(bench), jobs, threads, done) for one in runs())
        reference = next(generated)
        references.append(reference.outputs)
        across.append(outcome_of(threads, reference, references[0]))
        for run in generated:
            outcomes.append(outcome_of(threads, run, reference.outputs))
            differences.extend(differences_of(threads, run, reference.outputs, jobs))
    seconds = time.perf_counter() - began
    return ParityReport(config.dtype, len(prompts), max_tokens, outcomes, across[1:], differences, seconds)


@dataclass(frozen=True)
class Run:
    """What a contestant gave for the jobs, in their order."""

    contestant: Contestant
    samples: list[Sample]
    seconds: float

    @property
    def outputs(self) -> Outputs:
        return [sample.token_ids for sample in self.samples]


def run_contestant(
    one: Contestant, runner: JobRunner, drafter: Drafter, jobs: list[Job], threads: int, done: Callable[[str], None]
) -> Run:
    """All jobs, with a drafter that is what `one` says."""
    label = f"{one.name}, {one.concurrency} at a time, {threads} thread{'s' if threads > 1 else ''}"
    slots = scarce_slots(runner, jobs) if one.preempted else None
    began = time.perf_counter()
    samples = runner.run(drafter, jobs, one.concurrency, partial(done, label), SALT, one.nodes, slots)
    return Run(one, samples, time.perf_counter() - began)


def scarce_slots(runner: JobRunner, jobs: Sequence[Job]) -> int:
    """Half of what the longest batch needs, and enough for the longest sequence."""
    lengths = sorted(len(runner.engine.check_prompt(job.prompt.text)) + job.params.max_tokens for job in jobs)
    return max(lengths[-1], sum(lengths[-BATCH:]) // 2)


def outcome_of(threads: int, run: Run, reference: Outputs) -> Outcome:
    """What the comparison of a run comes to."""
    differing = sum(a != b for a, b in zip(run.outputs, reference, strict=True))
    stats = [sample.request.stats for sample in run.samples]
    return Outcome(
        threads=threads,
        drafter=run.contestant.name,
        concurrency=run.contestant.concurrency,
        compared=len(reference),
        differing=differing,
        verified=sum(one.draft_tokens for one in stats),
        accepted=sum(one.accepted_tokens for one in stats),
        preemptions=sum(one.preemptions for one in stats),
        seconds=run.seconds,
    )


def differences_of(threads: int, run: Run, reference: Outputs, jobs: list[Job]) -> Iterator[Difference]:
    """Of each unequal sequence the first."""
    for job, left, right in zip(jobs, run.outputs, reference, strict=True):
        index = first_difference(left, right)
        if index is not None:
            yield Difference(
                threads, run.contestant.name, run.contestant.concurrency, job.prompt.id, job.setting, index
            )


def print_parity(report: ParityReport) -> None:
    """Compared and differing sequences of each run, and the first differences."""
    header = (
        "drafter",
        "at a time",
        "threads",
        "compared",
        "differing",
        "equal",
        "verified",
        "accepted",
        "preempted",
        "seconds",
    )
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
    return (*counts, equal, outcome.verified, outcome.accepted, outcome.preemptions, f"{outcome.seconds:.0f}")
