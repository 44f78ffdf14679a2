"""How long a stream stands still beside a prompt that is scored, and what log-probabilities cost an output.

    python benchmarks/logprob_stall.py

A server of a small random model with a large vocabulary. Gaps are those between events of a streamed completion, as its
client sees them, while the server answers another client's prompt, new each time: the longest of each repetition, and
how long that answer took. The speed is of an output that has the server for itself.
"""

import asyncio
import random
import statistics
import tempfile
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness import Options, run
from programs import Program, start_server
from random_models import write_served_model
from transformers import AutoTokenizer

from pilotfish.cli.bench.contestants import take_turns
from pilotfish.cli.bench.gpu import llama
from pilotfish.cli.bench.report import ProgressBar, Report, Row, Spread, ratios
from pilotfish.cli.bench.serving.client import COMPLETIONS, Exchange, exchange
from pilotfish.config.engine import EngineConfig
from pilotfish.engine.pairs import resolve_pair
from pilotfish.model.loading.loader import DTYPES

#: Events of the stream before the prompt, and after it.
BEFORE, AFTER = 8, 3
#: Tokens that a measured output has.
TOKENS = 96
Figures = dict[str, float]
#: What a request asks for, by name; the first is what the others are compared with.
PROMPTS = {"none": {}, "prompt_logprobs 0": {"prompt_logprobs": 0}, "prompt_logprobs 5": {"prompt_logprobs": 5}}
OUTPUTS = {"none": {}, "logprobs 0": {"logprobs": 0}, "logprobs 5": {"logprobs": 5}}


def run_stall(options: Options, progress: ProgressBar) -> Report:
    """Both tables of each vocabulary."""
    progress.total = len(options.vocab) * (options.repeats + 1) * (len(PROMPTS) + len(OUTPUTS))
    tables = [measured(options, vocab, progress) for vocab in options.vocab]
    gaps, speeds = ([row for table in tables for row in table[name]] for name in ("gaps", "speeds"))
    return Report({"dtype": options.dtype, "gaps": gaps, "speeds": speeds})


def measured(options: Options, vocab: int, progress: ProgressBar) -> dict[str, list[Row]]:
    """Both tables of a server with such a vocabulary."""
    heads = options.hidden // 64
    shape = llama(options.layers, options.hidden, heads, heads, 4 * options.hidden)
    shape.vocab_size = vocab
    with tempfile.TemporaryDirectory() as directory:
        write_served_model(shape, DTYPES[options.dtype], Path(directory))
        with start_server(EngineConfig(target=Path(directory), dtype=options.dtype)) as server:
            prompts = Prompts(options.prompt)
            gaps = turns(PROMPTS, lambda asked: beside_a_stream(server, prompts, asked), options.repeats, progress)
            speeds = turns(OUTPUTS, lambda asked: alone(server, prompts, asked), options.repeats, progress)
    return {"gaps": table(vocab, "prompt", gaps, "gap_ms"), "speeds": table(vocab, "output", speeds, "tokens_per_s")}


class Prompts:
    """Random ones, all different."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._known = len(AutoTokenizer.from_pretrained(resolve_pair("pycode").target))
        self._random = random.Random(0)

    def take(self, tokens: int) -> list[int]:
        return [self._random.randrange(self._known) for _ in range(tokens)]


def turns(
    kinds: dict[str, dict[str, Any]], measure: Callable[[dict[str, Any]], Figures], repeats: int, progress: ProgressBar
) -> dict[str, list[Figures]]:
    """Each kind in turn; the first turn warms up."""
    contestants = {name: lambda _, asked=asked: measure(asked) for name, asked in kinds.items()}
    return take_turns(contestants, range(repeats + 1), done=progress)


def table(vocab: int, what: str, found: dict[str, list[Figures]], compared: str) -> list[Row]:
    """Medians and quartiles of all figures, and the ratio of one to that of the first kind."""
    rows, (first, *_) = list[Row](), found.values()
    for name, own in found.items():
        figures = {figure: Spread.of([one[figure] for one in own]) for figure in own[0]}
        ratio = ratios([one[compared] for one in own], [one[compared] for one in first])
        rows.append({"vocabulary": vocab, what: name, **figures, "ratio": ratio})
    return rows


def beside_a_stream(server: Program, prompts: Prompts, asked: dict[str, Any]) -> Figures:
    return asyncio.run(_beside_a_stream(server.told["url"], prompts, asked))


async def _beside_a_stream(url: str, prompts: Prompts, asked: dict[str, Any]) -> Figures:
    streams = list[Exchange]()

    def begun(request: bytes) -> Exchange:
        streams.append(Exchange(request))
        return streams[0]

    neighbour = asyncio.create_task(exchange(url, COMPLETIONS, streamed(prompts.take(4), 3000), begun))
    while not streams or len(streams[0].parts) < BEFORE:
        await asyncio.sleep(0.01)
    body = {"prompt": prompts.take(prompts.tokens), "max_tokens": 1, "temperature": 0, **asked}
    scored = await exchange(url, COMPLETIONS, body)
    seen = len(streams[0].parts)
    while len(streams[0].parts) < seen + AFTER:
        await asyncio.sleep(0.01)
    neighbour.cancel()
    with suppress(asyncio.CancelledError):
        await neighbour
    spans = pairwise(at for at, _ in streams[0].parts)
    gap = max(end - start for start, end in spans if end >= scored.sent and start <= scored.closed)
    return {"gap_ms": 1000 * gap, "answer_ms": 1000 * (scored.closed - scored.sent)}


def alone(server: Program, prompts: Prompts, asked: dict[str, Any]) -> Figures:
    """By the median of the gaps."""
    body = {**streamed(prompts.take(4), TOKENS), **asked}
    parts = asyncio.run(exchange(server.told["url"], COMPLETIONS, body)).parts
    gap = statistics.median(end - start for start, end in pairwise(at for at, _ in parts[1:]))
    return {"tokens_per_s": 1 / gap}


def streamed(prompt: list[int], tokens: int) -> dict[str, Any]:
    """A completion with an event for each token, whatever it is."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {**body, "stream": True, "return_token_ids": True}


if __name__ == "__main__":
    run(run_stall, vocab=[262_144, 49_152], layers=4, hidden=256, prompt=500, dtype="bfloat16", repeats=5)
