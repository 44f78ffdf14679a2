"""What int8 weights cost in quality and save in time: loss, agreement, acceptance and forwards beside plain weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np
import torch

from pilotfish.bench.acceptance import CONCURRENCY, acceptance
from pilotfish.bench.drafters import Bench
from pilotfish.bench.machine import Machine, describe_machine
from pilotfish.bench.profile import CONTEXT, interleaved_ms
from pilotfish.bench.report import print_table
from pilotfish.bench.workload import TEMPERATURES, Prompt, jobs_at
from pilotfish.config import EngineConfig, Quantization
from pilotfish.core.executor import NodeRows, SequenceRows
from pilotfish.core.tree import OTHER, TokenTree
from pilotfish.engine.sample import Sample
from pilotfish.model.runner import Runner

QUANTIZATIONS: tuple[Quantization, ...] = ("none", "int8")
ROWS = (1, 8, 16)
CHUNK = 64  # tokens that one forward scores


@dataclass(frozen=True)
class ModelResult:
    """One model in one quantization, scored on the prompts' own tokens."""

    model: str  # target or draft
    quantization: str
    loss: float  # nats a token
    agreement: float  # share of positions whose likeliest token is that of plain weights
    forward_ms: dict[int, float]  # by rows, at `CONTEXT` positions; quantizations in turn


@dataclass(frozen=True)
class PairResult:
    """A target with a draft, each in one quantization, at one temperature."""

    target: str
    draft: str
    temperature: float
    tokens_per_verify_step: float
    equal_outputs: float  # share of the outputs that are those of plain weights


@dataclass(frozen=True)
class QuantizationReport:
    """All models, all pairs, and the tree that was grown."""

    machine: Machine
    target: str
    dtype: str
    prompts: int
    scored_tokens: int
    max_tokens: int
    nodes: int
    levels: int
    width: int
    models: list[ModelResult]
    pairs: list[PairResult]


@dataclass(frozen=True)
class Scores:
    """A model's opinion of some text, position by position."""

    losses: torch.Tensor  # float32 [positions]
    likeliest: torch.Tensor  # int64 [positions]


def run_quantization(
    config: EngineConfig,
    prompts: list[Prompt],
    max_tokens: int,
    repeats: int,
    machine: Machine | None = None,
    done: Callable[[str], None] = lambda _: None,
) -> QuantizationReport:
    """`machine` is probed unless given; `repeats` of each forward. `done` is called with a label for each sequence."""
    benches = {name: Bench(replace(config, quantization=name)) for name in QUANTIZATIONS}
    texts = [benches["none"].engine.check_prompt(prompt.text) for prompt in prompts]
    targets = {name: bench.engine.runner for name, bench in benches.items()}
    drafts = {name: bench.draft_runner for name, bench in benches.items()}
    models = [*compare_models("target", targets, texts, repeats), *compare_models("draft", drafts, texts, repeats)]
    pairs = [result for t in TEMPERATURES for result in compare_pairs(benches, prompts, t, max_tokens, done)]
    machine, shape = machine or describe_machine(config.dtype), (config.nodes, config.levels, config.width)
    scored = sum(len(text) - 1 for text in texts)
    return QuantizationReport(
        machine, str(config.target), config.dtype, len(prompts), scored, max_tokens, *shape, models, pairs
    )


def num_sequences(num_prompts: int) -> int:
    """How many sequences `run_quantization` generates."""
    return num_prompts * len(TEMPERATURES) * len(QUANTIZATIONS) ** 2


def compare_models(
    model: str, runners: dict[Quantization, Runner], texts: Sequence[Sequence[int]], repeats: int
) -> list[ModelResult]:
    """One model in every quantization."""
    scores = {name: score(runner, texts) for name, runner in runners.items()}
    times = {rows: interleaved_ms(runners, rows, repeats) for rows in ROWS}
    plain = scores["none"].likeliest
    return [
        ModelResult(
            model,
            name,
            loss=scores[name].losses.mean().item(),
            agreement=(scores[name].likeliest == plain).float().mean().item(),
            forward_ms={rows: times[rows][name] for rows in ROWS},
        )
        for name in runners
    ]


def score(runner: Runner, texts: Sequence[Sequence[int]]) -> Scores:
    """Every token after the first of each text."""
    parts = [part for text in texts for part in _score_text(runner, text)]
    return Scores(torch.cat([part.losses for part in parts]), torch.cat([part.likeliest for part in parts]))


def _score_text(runner: Runner, tokens: Sequence[int]) -> list[Scores]:
    """By chunks: a committed token and a chain of nodes below it, since nodes give their logits."""
    parts, slots = [], np.arange(len(tokens), dtype=np.int32)
    for first in range(0, len(tokens) - 1, CHUNK):
        chunk, wanted = tokens[first : first + CHUNK], torch.tensor(tokens[first + 1 : first + CHUNK + 1])
        chain = TokenTree.chain(chunk[1:], [0.0] * (len(chunk) - 1), OTHER)
        nodes = NodeRows.of(chain, slots[first + 1 : first + len(chunk)])
        rows = SequenceRows(first, chunk[:1], slots[: first + 1], nodes, kept=[0])
        logits = runner.forward([rows])[: len(wanted)]
        losses = torch.nn.functional.cross_entropy(logits, wanted.to(logits.device), reduction="none")
        parts.append(Scores(losses, logits.argmax(dim=-1)))
    return parts


def compare_pairs(
    benches: dict[Quantization, Bench],
    prompts: list[Prompt],
    temperature: float,
    max_tokens: int,
    done: Callable[[str], None],
) -> list[PairResult]:
    """Every target with every draft; the pair of plain weights first."""
    jobs = jobs_at(prompts, temperature, max_tokens)
    results, plain = [], None
    for target, draft in product(QUANTIZATIONS, repeat=2):
        label = f"target {target}, draft {draft}, T={temperature:g}"
        samples = benches[target].run(benches[draft].lm(), jobs, CONCURRENCY, partial(done, label))
        plain = plain or samples
        steps = acceptance("lm", temperature, samples).tokens_per_verify_step
        results.append(PairResult(target, draft, temperature, steps, equal_outputs(samples, plain)))
    return results


def equal_outputs(samples: Sequence[Sample], others: Sequence[Sample]) -> float:
    """Share of the samples whose tokens are the same in both."""
    pairs = zip(samples, others, strict=True)
    return sum(sample.token_ids == other.token_ids for sample, other in pairs) / len(samples)


def print_quantization(report: QuantizationReport) -> None:
    times = [f"ms of {rows} rows" for rows in ROWS]
    title = f"{report.target}, {report.dtype}: {report.scored_tokens} tokens of {report.prompts} prompts"
    header = ("model", "weights", "nats/token", "same likeliest token", *times)
    print_table(f"{title}, forwards at context {CONTEXT}", header, map(_model_row, report.models))
    title = f"{report.nodes} nodes, up to {report.levels} levels of {report.width} leaves, {report.prompts} prompts"
    header = ("target", "draft", "T", "tokens/verify step", "outputs as with none")
    print_table(title, header, map(_pair_row, report.pairs))


def _model_row(result: ModelResult) -> tuple[object, ...]:
    times = (f"{ms:.2f}" for ms in result.forward_ms.values())
    return result.model, result.quantization, f"{result.loss:.4f}", f"{result.agreement:.2%}", *times


def _pair_row(result: PairResult) -> tuple[object, ...]:
    steps = f"{result.tokens_per_verify_step:.2f}"
    return result.target, result.draft, f"{result.temperature:g}", steps, f"{result.equal_outputs:.0%}"
