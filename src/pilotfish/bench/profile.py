"""Where the time of one step goes, and what a forward costs by its rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from pilotfish.bench.drafters import Bench
from pilotfish.bench.machine import Machine, describe_machine, timed
from pilotfish.bench.report import print_table
from pilotfish.bench.workload import TEMPERATURES, Prompt, jobs_at
from pilotfish.config import EngineConfig
from pilotfish.core.executor import NO_NODES, NodeRows, SequenceRows
from pilotfish.core.tree import TreeBuilder
from pilotfish.model.runner import Runner

DRAFTERS = ("off", "lm", "lm+ngram")
ROWS = (1, 4, 8, 16, 32, 64)
CONTEXT = 256
WARM_UP = 3
Name = TypeVar("Name", bound=str)
#: What is neither model nor sampling.
RUNTIME = ("schedule", "rows", "commit", "text")


@dataclass(frozen=True)
class StepProfile:
    """Mean milliseconds of one step by part; `text` is all that is outside the worker's step."""

    drafter: str
    temperature: float
    steps: int
    milliseconds: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.milliseconds.values())

    @property
    def runtime_share(self) -> float:
        """Of the runtime itself: scheduling, filling the forward's tensors, committing, text."""
        return sum(self.milliseconds[part] for part in RUNTIME) / self.total


@dataclass(frozen=True)
class ProfileReport:
    """`forward_ms` by rows at `CONTEXT` positions; `draft_forward_ms` of `width` rows."""

    machine: Machine
    target: str
    dtype: str
    quantization: str
    nodes: int
    levels: int
    width: int
    steps: list[StepProfile]
    forward_ms: dict[int, float]
    draft_forward_ms: float


def run_profile(
    config: EngineConfig,
    prompts: list[Prompt],
    max_tokens: int,
    repeats: int,
    machine: Machine | None = None,
    done: Callable[[str], None] = lambda _: None,
) -> ProfileReport:
    """`machine` is probed unless given; `repeats` of each forward. `done` is called with a label for each sequence."""
    bench = Bench(config)
    steps = []
    for temperature in TEMPERATURES:
        for name in DRAFTERS:
            profile_steps(bench, name, temperature, prompts[:1], max_tokens)  # warm-up
            steps.append(profile_steps(bench, name, temperature, prompts, max_tokens, done))
    forward = {rows: forward_ms(bench.engine.runner, rows, repeats) for rows in ROWS}
    draft = forward_ms(bench.draft_runner, config.width, repeats)
    machine = machine or describe_machine(config.dtype)
    precision, shape = (config.dtype, config.quantization), (config.nodes, config.levels, config.width)
    return ProfileReport(machine, str(config.target), *precision, *shape, steps, forward, draft)


def num_sequences(num_prompts: int) -> int:
    """How many sequences `run_profile` generates, warm-up left out."""
    return num_prompts * len(TEMPERATURES) * len(DRAFTERS)


def profile_steps(
    bench: Bench,
    drafter: str,
    temperature: float,
    prompts: list[Prompt],
    max_tokens: int,
    done: Callable[[str], None] = lambda _: None,
) -> StepProfile:
    """All prompts, one at a time."""
    worker, jobs = bench.engine.worker, jobs_at(prompts, temperature, max_tokens)
    before, began = replace(worker.times), time.perf_counter()
    bench.run(bench.drafter(drafter), jobs, 1, partial(done, f"{drafter}, T={temperature:g}"))
    seconds = time.perf_counter() - began
    spent = worker.times.minus(before)
    parts = {name: getattr(spent, name) for name in ("draft", "schedule", "rows", "forward", "verify", "commit")}
    parts["text"] = seconds - sum(parts.values())
    milliseconds = {name: 1000 * part / spent.steps for name, part in parts.items()}
    return StepProfile(drafter, temperature, spent.steps, milliseconds)


def forward_ms(runner: Runner, rows: int, repeats: int) -> float:
    """Median milliseconds of the forward of `step_rows`."""
    return interleaved_ms({"": runner}, rows, repeats)[""]


def interleaved_ms(runners: Mapping[Name, Runner], rows: int, repeats: int) -> dict[Name, float]:
    """Of each runner, which take turns: what else the machine does meanwhile slows them alike."""
    steps = {name: step_rows(runner, rows) for name, runner in runners.items()}
    rounds = [
        {name: timed(partial(runner.forward, [steps[name]])) for name, runner in runners.items()}
        for _ in range(WARM_UP + repeats)
    ]
    return {name: 1000 * statistics.median(times[name] for times in rounds[WARM_UP:]) for name in runners}


def step_rows(runner: Runner, rows: int) -> SequenceRows:
    """The step of `context_and_tree`, whose context this computes."""
    before, step = context_and_tree(rows, runner.model.shape.vocab_size)
    runner.forward([before])
    return step


def context_and_tree(rows: int, vocab_size: int) -> tuple[SequenceRows, SequenceRows]:
    """`CONTEXT` tokens; then a token and a tree below it, `rows` together. Slots count up from 0."""
    trunk = np.arange(CONTEXT + 1, dtype=np.int32)
    prompt = [1 + token % (vocab_size - 1) for token in range(CONTEXT + 1)]
    tree = TreeBuilder()
    for node in range(rows - 1):
        tree.add(node // 4 - 1, (node + 1) % vocab_size, -float(node + 1))
    nodes = NodeRows.of(tree.tree(), np.arange(CONTEXT + 1, CONTEXT + rows, dtype=np.int32))
    before = SequenceRows(0, prompt[:CONTEXT], trunk[:CONTEXT], NO_NODES, kept=[CONTEXT - 1])
    return before, SequenceRows(CONTEXT, prompt[CONTEXT:], trunk, nodes, kept=[0])


def print_profile(report: ProfileReport) -> None:
    parts = list(report.steps[0].milliseconds)
    header = ("drafter", "T", "steps", "ms/step", *parts, "runtime")
    tree = f"{report.nodes} nodes, up to {report.levels} levels of {report.width} leaves"
    precision = f"{report.dtype}, quantization {report.quantization}"
    print_table(f"one step of {report.target}, {precision}, {tree}", header, map(_row, report.steps))
    rows = [(rows, f"{ms:.2f}", f"{ms / report.forward_ms[1]:.2f}") for rows, ms in report.forward_ms.items()]
    print_table(f"target forward at context {CONTEXT}", ("rows", "ms", "of one row"), rows)
    print_table("draft forward", ("rows", "ms"), [(report.width, f"{report.draft_forward_ms:.2f}")])


def _row(step: StepProfile) -> tuple[object, ...]:
    shares = (f"{ms / step.total:.1%}" for ms in step.milliseconds.values())
    head = (step.drafter, f"{step.temperature:g}", step.steps, f"{step.total:.2f}")
    return (*head, *shares, f"{step.runtime_share:.1%}")
