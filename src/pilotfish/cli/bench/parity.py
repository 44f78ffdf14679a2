"""Lossless or not: the tokens of every drafter, or of mode async, against those of the target alone, by ==."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from pilotfish.cli.bench.contestants import OFF, Contestant, Run, contestant_of, drafting
from pilotfish.cli.bench.options import BenchOptions
from pilotfish.cli.bench.report import ProgressBar, Report, Row
from pilotfish.cli.bench.workload import Job, Prompt, parse_numbers
from pilotfish.config.engine import EngineConfig
from pilotfish.core.cache.tiers import HOST
from pilotfish.core.drafting.drafter import DraftLimits, NoDrafter
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.budget import FixedBudget
from pilotfish.core.scheduling.request import Request
from pilotfish.core.scheduling.scheduler import HEADROOM
from pilotfish.core.trees.tree import Guesses
from pilotfish.engine.engine import Engine
from pilotfish.errors import EngineError

#: The settings of the parity promise.
PARITY_SETTINGS = msgspec.toml.decode(
    Path(__file__).with_name("parity.toml").read_bytes(), type=dict[str, SamplingParams]
)
#: The drafter of random trees, and the nodes of the largest.
RANDOM, MOST_RANDOM = "random", 24
TREES = (("lm", 4), ("lm", 16), ("lm", 48), ("ngram", 0), ("suffix", 0), ("lm+ngram", 0), ("lm+suffix", 0),
         ("lm+ngram+suffix", 0), (RANDOM, MOST_RANDOM))  # fmt: skip
ASYNC_NODES = 16
#: As a 70B target and a 1B draft.
PACE = "target=10.4ms,draft=2.6ms"
#: Counts of tokens whose KV some option brings: without any it shows nothing.
FROM_ELSEWHERE = {"kv_host_memory": "from_host", "prefill_workers": "handed_over"}
#: Of all runs: what has ended before is what suffix drafters guess from.
SALT = "parity"


@dataclass(frozen=True)
class ParityCase:
    """A drafter that is compared with `off` alone, or a kind of async engine."""

    drafter: str
    batched: bool  # with others; or alone
    nodes: int = 0  # of a tree; 0: as configured
    preempted: bool = False  # with a KV pool too small for its batch

    @property
    def name(self) -> str:
        nodes = f" {self.nodes}" if self.drafter == "lm" else ""
        return self.drafter + nodes + (", preempted" if self.preempted else "")


REFERENCE = ParityCase(OFF, batched=False)
#: Batched cases, which are quicker, first.
CASES = (
    ParityCase(OFF, batched=True),
    *(ParityCase(name, True, nodes) for name, nodes in TREES),
    ParityCase(OFF, batched=True, preempted=True),
    ParityCase("lm+ngram+suffix", batched=True, preempted=True),
    *(ParityCase(name, False, nodes) for name, nodes in TREES),
)


def async_cases(workers: int, pace: str) -> list[ParityCase]:
    """Those of an engine of mode async that starts so many draft workers; they and the target may be paced."""
    name = f"async, {workers} draft{'s' if workers > 1 else ''}" + (", paced" if pace else "")
    return [ParityCase(name, True), ParityCase(name, True, preempted=True), ParityCase(name, False)]


def async_config(sync: EngineConfig, workers: int, pace: str) -> EngineConfig:
    """The target has as many of the first cores as threads, the drafts some of the others. Where it has them all they
    share them, and one draft has as many threads as the target, each of three fewer."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[: sync.threads]))
    return replace(sync, mode="async", cores=cores, draft_workers=workers, nodes=ASYNC_NODES, pace=pace, budget="fixed")


#: Engines of mode async: numbers of draft workers, and paces.
SETUPS = tuple((workers, pace) for pace in ("", PACE) for workers in (1, 3))


def run_parity(options: BenchOptions, progress: ProgressBar) -> Report:
    """Models are loaded once for each thread count and async engine. `across_threads` compares `off` alone with itself
    at the first thread count. Float32 and CUDA promise equality, shown on trees; lower precision on a processor has
    only a match rate."""
    thread_counts, prompts = parse_numbers("threads", options.thread_counts), options.rows()
    config = options.engine_config(threads=thread_counts[0])
    jobs = mixed_jobs(prompts, PARITY_SETTINGS, options.max_tokens)
    num_cases = len(CASES) if options.compared == "sync" else sum(len(async_cases(*setup)) for setup in SETUPS)
    progress.total = len(thread_counts) * (1 + num_cases) * len(jobs)
    began, references = time.perf_counter(), list[Run]()
    outcomes, across, differences = list[Row](), list[Row](), list[Row]()
    for threads in thread_counts:
        runs = _runs(replace(config, threads=threads), options, jobs, progress)
        references.append(next(runs)[1])
        across.append(outcome_of(REFERENCE, references[-1], references[0], threads, options))
        for case, run in runs:
            outcomes.append(outcome_of(case, run, references[-1], threads, options))
            differences.extend(differences_of(outcomes[-1], run, references[-1], jobs))
    results = {"outcomes": outcomes, "across_threads": across[1:], "differences": differences}
    counted = ("compared", "differing", "from_host", "handed_over")
    counts = {name: sum(outcome[name] for outcome in outcomes) for name in counted}
    unused = [
        *(options.engine[option] and not counts[name] for option, name in FROM_ELSEWHERE.items()),
        *(outcome["vacuous"] for outcome in outcomes),
    ]
    unproved = counts["differing"] > 0 or any(unused)
    promised = options.precision == "float32" or config.device.startswith("cuda")
    seconds = time.perf_counter() - began
    return Report({**results, **counts, "seconds": seconds}, failed=promised and unproved)


def _runs(
    config: EngineConfig, options: BenchOptions, jobs: Sequence[Job], progress: ProgressBar
) -> Iterator[tuple[ParityCase, Run]]:

    def run(engine: Engine, contestant: Contestant, case: ParityCase) -> tuple[ParityCase, Run]:
        most = options.concurrency
        together = most if case.batched else 1
        done = partial(progress, f"{case.name}, {together} at a time")
        with scarce_slots(engine, jobs, most) if case.preempted else nullcontext():
            return case, contestant.run(engine, jobs, together, done, SALT)

    with Engine(config) as sync:
        if sync.config.eager and not config.eager:
            raise EngineError("device: its kernels do not run, so that nothing is shown of them; the log says why")
        for case in (REFERENCE, *(CASES if options.compared == "sync" else ())):
            yield run(sync, _contestant(sync, case), case)
    for setup in SETUPS if options.compared == "async" else ():
        with Engine(async_config(config, *setup)) as engine:
            for case in async_cases(*setup):
                yield run(engine, contestant_of(engine), case)


def _contestant(engine: Engine, case: ParityCase) -> Contestant:
    if case.drafter != RANDOM:
        return drafting(engine, case.drafter, case.nodes)
    return Contestant(partial(RandomDrafter, engine.model.config.vocab_size), partial(FixedBudget, case.nodes, 1))


@contextmanager
def scarce_slots(engine: Engine, jobs: Sequence[Job], together: int) -> Iterator[None]:
    """Leave half of the slots that the longest batch needs, an eighth where requests share those of their prompts, and
    enough for the longest sequence. The target admits what only just fits, so that requests are preempted."""
    scheduler, part = engine.worker.scheduler, 8 if engine.config.prefix_cache else 2
    lengths = sorted(len(engine.check_prompt(job.prompt.text)) + job.params.max_tokens for job in jobs)
    slots = max(lengths[-1], sum(lengths[-together:]) // part)
    held = scheduler.cache.allocate(scheduler.pool.capacity - slots)
    scheduler.headroom = 1
    yield
    scheduler.headroom = HEADROOM
    scheduler.pool.release(held)


def mixed_jobs(prompts: Sequence[Prompt], settings: dict[str, SamplingParams], max_tokens: int) -> list[Job]:
    """Every prompt under every setting, so ordered that any few neighbours mix prompts and settings."""
    names, jobs = list(settings), []
    for turn in range(len(names)):
        for index, prompt in enumerate(prompts):
            name = names[(index + turn) % len(names)]
            params = replace(settings[name], max_tokens=max_tokens, seed=prompt.seed)
            jobs.append(Job(prompt, name, params))
    return jobs


def outcome_of(case: ParityCase, run: Run, reference: Run, threads: int, options: BenchOptions) -> Row:
    """`verified` counts the nodes of all trees, `accepted` those on accepted paths, `from_host` and `handed_over` the
    tokens whose KV came from host memory and from prefill workers. A drafter that offers nothing is equal and shows
    nothing, as does a scarce pool in which nobody gave way."""
    verified, preemptions = run.total("draft_tokens"), run.total("preemptions")
    return {
        "drafter": case.name,
        "concurrency": options.concurrency if case.batched else 1,
        "threads": threads,
        "compared": len(run.outputs),
        "differing": sum(a != b for a, b in zip(run.outputs, reference.outputs, strict=True)),
        "verified": verified,
        "accepted": run.total("accepted_tokens"),
        "preemptions": preemptions,
        "from_host": sum(one.cached_by_tier.get(HOST, 0) for one in run.stats),
        "handed_over": sum(report.tokens for one in run.stats for report in one.handovers),
        "vacuous": (verified == 0 and case.drafter != OFF) or (preemptions == 0 and case.preempted),
        "seconds": run.seconds,
    }


def differences_of(outcome: Row, run: Run, reference: Run, jobs: Sequence[Job]) -> Iterator[Row]:
    """The first unequal token of each unequal sequence."""
    where = {name: outcome[name] for name in ("threads", "drafter", "concurrency")}
    for job, left, right in zip(jobs, run.outputs, reference.outputs, strict=True):
        if left != right:
            unequal = (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
            index = next(unequal, min(len(left), len(right)))
            yield {**where, "prompt": job.prompt.id, "setting": job.setting, "index": index}


class RandomDrafter(NoDrafter):
    """Trees of random shape and random tokens: half from the vocabulary, half from the sequence itself.

    A tree is a function of the request's seed and length, so a run can be repeated."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[Guesses]:  # noqa: ARG002
        return [self._tree(request) for request in requests]

    def _tree(self, request: Request) -> Guesses:
        rng = np.random.default_rng((request.seed, len(request.tokens)))
        tree = Guesses()
        for _ in range(rng.integers(MOST_RANDOM + 1)):
            seen = request.tokens[rng.integers(len(request.tokens))]
            token = seen if rng.random() < 0.5 else int(rng.integers(self.vocab_size))
            tree.add(int(rng.integers(-1, len(tree))), token, -float(rng.exponential()))
        return tree
