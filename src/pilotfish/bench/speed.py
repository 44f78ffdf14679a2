"""Tokens per second of this engine and of transformers: same weights, precision, threads and prompts, in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from pilotfish.bench.compare import Spread, distinct_ngrams, pairwise_ratios
from pilotfish.bench.drafters import Bench
from pilotfish.bench.machine import Machine, describe_machine
from pilotfish.bench.report import print_table
from pilotfish.bench.workload import TEMPERATURES, Prompt
from pilotfish.config import EngineConfig
from pilotfish.core.drafter import Drafter
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.model.loader import DTYPES
from pilotfish.model.quantize import quantize

LOOKUP_TOKENS = 10
BEST = "transformers, better of plain and assisted"
#: What is divided by what, round by round, where both took part.
RATIOS = (
    ("sync lm", "off"),
    ("sync lm+ngram", "off"),
    ("sync ngram", "off"),
    ("off", "transformers"),
    ("sync lm", "transformers"),
    ("sync lm+ngram", "transformers"),
    ("sync lm", "transformers assisted"),
    ("sync lm+ngram", "transformers assisted"),
    ("sync lm", BEST),
    ("sync lm+ngram", BEST),
    ("sync ngram", "transformers prompt lookup"),
    ("sync lm+ngram", "transformers prompt lookup"),
)


@dataclass(frozen=True)
class Run:
    """One output; seconds from the first call with the prompt's ids to the last token."""

    seconds: float
    tokens: list[int]
    verify_steps: int | None = None

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds


class Contestant(Protocol):
    """Something that generates."""

    name: str

    def takes_part(self, temperature: float) -> bool:
        """Whether it is measured at this temperature."""

    def run(self, prompt: list[int], temperature: float, seed: int, max_tokens: int) -> Run:
        """One prompt alone to its end."""


class OurEngine:
    """This engine with one of its drafters."""

    def __init__(self, name: str, bench: Bench, drafter: Drafter) -> None:
        self.name = name
        self._bench = bench
        self._drafter = drafter

    def takes_part(self, temperature: float) -> bool:  # noqa: ARG002
        return True

    def run(self, prompt: list[int], temperature: float, seed: int, max_tokens: int) -> Run:
        self._bench.use(self._drafter)
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
        began = time.perf_counter()
        [sample] = self._bench.engine.submit(prompt, params)
        self._bench.drain()
        return Run(time.perf_counter() - began, sample.token_ids, sample.request.stats.verify_steps)


class Transformers:
    """`generate` as its user has it: its own cache and attention, nothing of ours."""

    def __init__(self, name: str, model: Any, *, greedy_only: bool = False, **options: Any) -> None:
        self.name = name
        self._model = model
        self._greedy_only = greedy_only
        self._options = options

    def takes_part(self, temperature: float) -> bool:
        return temperature == 0 or not self._greedy_only

    def run(self, prompt: list[int], temperature: float, seed: int, max_tokens: int) -> Run:
        torch.manual_seed(seed)
        ids = torch.tensor([prompt])
        lengths = {"max_new_tokens": max_tokens, "min_new_tokens": max_tokens}
        options = {**lengths, **_sampling(temperature), **self._options}
        began = time.perf_counter()
        output = self._model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return Run(time.perf_counter() - began, output[0, len(prompt) :].tolist())


def _sampling(temperature: float) -> dict[str, Any]:
    """The plain distribution at this temperature, without the filters that generate has by default."""
    if temperature == 0:
        return {"do_sample": False}
    return {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def load_contestants(config: EngineConfig) -> tuple[Bench, list[Contestant]]:
    """The engine and transformers over the same directories, in the same precision and threads."""
    assert config.draft is not None
    bench = Bench(config)
    target, draft = _reference(config.target, config), _reference(config.draft, config)
    ours = {"off": "off", "sync lm": "lm", "sync lm+ngram": "lm+ngram", "sync ngram": "ngram"}
    return bench, [
        *(OurEngine(name, bench, bench.drafter(drafter)) for name, drafter in ours.items()),
        Transformers("transformers", target),
        Transformers("transformers assisted", target, assistant_model=draft),
        Transformers("transformers prompt lookup", target, greedy_only=True, prompt_lookup_num_tokens=LOOKUP_TOKENS),
    ]


def _reference(directory: Path, config: EngineConfig) -> Any:
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[config.dtype]).eval()
    if config.quantization != "none":  # the same weights for all
        quantize(module, config.quantization)
    return module


@dataclass(frozen=True)
class Speed:
    """One contestant at one temperature, over prompts and repeats."""

    contestant: str
    temperature: float
    tokens_per_second: Spread
    tokens_per_verify_step: float | None
    distinct_4grams: float


@dataclass(frozen=True)
class Ratio:
    """Of two contestants' tokens per second in the same round on the same prompt."""

    temperature: float
    numerator: str
    denominator: str
    ratio: Spread


@dataclass(frozen=True)
class SpeedReport:
    """Figures with all that is needed to judge them."""

    machine: Machine
    target: str
    draft: str
    dtype: str
    quantization: str
    prompts: int
    max_tokens: int
    repeats: int
    nodes: int
    levels: int
    width: int
    speeds: list[Speed]
    ratios: list[Ratio]


#: Runs of each contestant in order of rounds: all prompts, then all prompts again.
Rounds = dict[str, list[Run]]


def run_speed(
    config: EngineConfig,
    prompts: list[Prompt],
    max_tokens: int,
    repeats: int,
    machine: Machine | None = None,
    done: Callable[[str], None] = lambda _: None,
) -> SpeedReport:
    """`machine` is probed unless given. `done` is called with a label for each sequence, warm-up included."""
    bench, contestants = load_contestants(config)
    machine = machine or describe_machine(config.dtype)
    speeds: list[Speed] = []
    ratios: list[Ratio] = []
    for temperature in TEMPERATURES:
        playing = [c for c in contestants if c.takes_part(temperature)]
        rounds = _measure(bench, playing, temperature, prompts, max_tokens, repeats, done)
        speeds.extend(_speed(name, temperature, runs) for name, runs in rounds.items())
        ratios.extend(_ratios(temperature, rounds))
    precision = (config.dtype, config.quantization)
    sizes = (len(prompts), max_tokens, repeats, config.nodes, config.levels, config.width)
    return SpeedReport(machine, str(config.target), str(config.draft), *precision, *sizes, speeds, ratios)


def num_sequences(num_prompts: int, repeats: int) -> int:
    """How many sequences `run_speed` generates: seven contestants greedily, six when sampling."""
    return (7 + 6) * (num_prompts * repeats + 1)


def _measure(
    bench: Bench,
    contestants: Sequence[Contestant],
    temperature: float,
    prompts: list[Prompt],
    max_tokens: int,
    repeats: int,
    done: Callable[[str], None],
) -> Rounds:
    """The first prompt once to warm up, then every prompt with every contestant, who take turns in going first."""
    rounds: Rounds = {contestant.name: [] for contestant in contestants}
    schedule = [(prompts[0], 0)] + [(prompt, repeat) for repeat in range(repeats) for prompt in prompts]
    for turn, (prompt, repeat) in enumerate(schedule):
        ids = bench.engine.check_prompt(prompt.text)
        first = turn % len(contestants)
        for contestant in (*contestants[first:], *contestants[:first]):
            run = contestant.run(ids, temperature, prompt.seed + repeat, max_tokens)
            done(f"{contestant.name}, T={temperature:g}")
            if turn > 0:
                rounds[contestant.name].append(run)
    return rounds


def _speed(name: str, temperature: float, runs: list[Run]) -> Speed:
    steps = [run.verify_steps for run in runs if run.verify_steps is not None]
    return Speed(
        contestant=name,
        temperature=temperature,
        tokens_per_second=Spread.of([run.tokens_per_second for run in runs]),
        tokens_per_verify_step=sum(len(run.tokens) for run in runs) / sum(steps) if steps else None,
        distinct_4grams=distinct_ngrams([run.tokens for run in runs]),
    )


def _ratios(temperature: float, rounds: Rounds) -> list[Ratio]:
    speeds = {name: [run.tokens_per_second for run in runs] for name, runs in rounds.items()}
    speeds[BEST] = list(map(max, speeds["transformers"], speeds["transformers assisted"]))
    return [
        Ratio(temperature, above, below, Spread.of(pairwise_ratios(speeds[above], speeds[below])))
        for above, below in RATIOS
        if above in speeds and below in speeds
    ]


def print_speed(report: SpeedReport) -> None:
    machine = report.machine
    print_table(
        "machine",
        ("processor", "cores", "threads", "read GB/s", f"{machine.matmul_dtype} GFLOP/s", "torch", "transformers"),
        [(machine.cpu, machine.cores, machine.threads, f"{machine.read_gb_per_s:.1f}",
          f"{machine.matmul_gflop_per_s:.0f}", machine.torch, machine.transformers)],
    )  # fmt: skip
    tree = f"{report.nodes} nodes, up to {report.levels} levels of {report.width} leaves"
    precision = f"{report.dtype}, quantization {report.quantization}"
    title = f"{report.target}, {precision}, {report.prompts} prompts x {report.repeats}, {tree}"
    header = ("contestant", "T", "tokens/s: median (quartiles)", "min", "max", "tokens/verify step", "distinct 4-grams")
    print_table(title, header, map(_speed_row, report.speeds))
    rows = [(r.numerator, r.denominator, f"{r.temperature:g}", r.ratio) for r in report.ratios]
    print_table("ratios, round by round", ("", "over", "T", "median (quartiles)"), rows)


def _speed_row(speed: Speed) -> tuple[object, ...]:
    spread = speed.tokens_per_second
    per_step = "" if speed.tokens_per_verify_step is None else f"{speed.tokens_per_verify_step:.2f}"
    ends = (f"{spread.minimum:.1f}", f"{spread.maximum:.1f}")
    return speed.contestant, f"{speed.temperature:g}", spread, *ends, per_step, f"{speed.distinct_4grams:.2f}"
