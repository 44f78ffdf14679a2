"""Loss, acceptance and forwards with weights of int8, beside those of plain weights."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product

import numpy as np
import torch
from acceptance import ACCEPTANCE_CONCURRENCY
from harness import PAIR, TEMPERATURES, Options, run
from random_models import interleaved_ms

from pilotfish.cli.bench.contestants import drafting
from pilotfish.cli.bench.report import ProgressBar, Report, Row, equal_share
from pilotfish.cli.bench.workload import Job, jobs_at
from pilotfish.core.scheduling.executor import NodeRows, SequenceRows
from pilotfish.core.trees.tree import OTHER, Guesses
from pilotfish.engine.engine import Engine
from pilotfish.model.executor import TorchExecutor

QUANTIZATIONS = ("none", "int8")
QUANTIZATION_ROWS = (1, 8, 16)
CHUNK = 64  # tokens that one forward scores


def run_quantization(options: Options, progress: ProgressBar) -> Report:
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


if __name__ == "__main__":
    run(run_quantization, *PAIR, "levels", "width", "nodes", threads=2, repeats=20)
