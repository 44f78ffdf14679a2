"""`pilotfish generate`: prompts in, one output a row."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotfish.cli.options import ENGINE, SAMPLING, JsonOption, engine_config
from pilotfish.cli.show import JsonPrinter, Printer, TextPrinter, report, shown_when_slow, started, warn_of_overruns
from pilotfish.command import Given, taking
from pilotfish.config import EngineConfig
from pilotfish.core.logprobs import TokenLogprobs
from pilotfish.core.request import check_cache_salt
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.errors import EngineError, InputError, ParameterError
from pilotfish.prompts import BadRow, Row, prompt_of, read_rows

if TYPE_CHECKING:  # imports torch
    from pilotfish.engine.engine import Engine
    from pilotfish.engine.llm import Completion
    from pilotfish.engine.sample import Sample

MAX_CONCURRENCY = 4096
rows = partial(typer.Option, rich_help_panel="How rows are run")


@dataclass(frozen=True)
class Handling:
    """How rows are run."""

    cache_salt: str | None
    concurrency: int
    raw: bool
    profile: Path | None

    def __post_init__(self) -> None:
        check_cache_salt(self.cache_salt)
        if not 1 <= self.concurrency <= MAX_CONCURRENCY:
            raise ParameterError("concurrency", self.concurrency, f"an integer 1 to {MAX_CONCURRENCY}")
        if self.profile is not None and not self.profile.parent.is_dir():
            raise ParameterError("profile", str(self.profile), "a file in a directory that exists")


@taking(ENGINE, SAMPLING)
def generate(
    engine: Given,
    sampling: Given,
    prompt: Annotated[str | None, typer.Option(help="One prompt, taken as it is.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON Lines of {id, prompt} or {id, turns}.")] = None,
    cache_salt: Annotated[str | None, rows(help="The tenant from whose outputs suffix guesses.")] = None,
    concurrency: Annotated[int, rows(help="Rows that run at a time.")] = 1,
    raw: Annotated[bool, rows("--raw", help="Apply no chat template to turns.")] = False,
    profile: Annotated[Path | None, rows(help="Write a timeline of all operations to this file.")] = None,
    json: JsonOption = False,
) -> None:
    """Continue prompts. With --json one object a line: id, token_ids, text, finish_reason, seed, stats."""
    SamplingParams(**sampling)  # what cannot be is refused before a model is loaded
    handling = Handling(cache_salt, concurrency, raw, profile)
    if not json and ("logprobs" in sampling or "prompt_logprobs" in sampling):
        raise InputError("logprobs: they are reported with --json only")
    rows = _rows(prompt, prompts)
    config = engine_config(engine, max_requests=max(concurrency, EngineConfig.max_requests))
    good = [row for row in rows if isinstance(row, Row)]
    for row in rows:
        if isinstance(row, BadRow):
            report(row)
    served = bool(good) and _generate(config, sampling, good, JsonPrinter() if json else TextPrinter(), handling)
    if not served or len(good) < len(rows):
        raise typer.Exit(2)


def _rows(prompt: str | None, prompts: Path | None) -> list[Row | BadRow]:
    if (prompt is None) == (prompts is None):
        raise InputError("prompt: exactly one of --prompt and --prompts is needed")
    if prompts is not None:
        return read_rows(prompts)
    return [Row("prompt", (prompt or "",), chat=False, place="pilotfish")]


def _generate(config: EngineConfig, sampling: Given, rows: Sequence[Row], printer: Printer, handling: Handling) -> bool:
    """Load the models, print each row as it ends; whether all rows could be served."""
    with started(config) as engine:
        return _serve_rows(engine, engine.sampling_params(**sampling), rows, printer, handling)


@dataclass(frozen=True)
class Finished:
    """A row and its outputs, in order of their index."""

    row: Row
    prompt_tokens: int
    outputs: list[Completion]
    prompt_logprobs: list[TokenLogprobs] | None
    drops: dict[str, dict[str, int]]  # of draft pools' messages, since the engine started

    def records(self) -> list[dict[str, Any]]:
        """One JSON object for each output; `index` tells them apart where there are several."""
        return [self._record(output) for output in self.outputs]

    def _record(self, output: Completion) -> dict[str, Any]:
        index = {"index": output.index} if len(self.outputs) > 1 else {}
        return {
            "id": self.row.id,
            **index,
            "prompt_tokens": self.prompt_tokens,
            "token_ids": output.token_ids,
            "text": output.text,
            "finish_reason": output.finish_reason,
            "seed": output.seed,
            **_reported("logprobs", output.logprobs),
            **_reported("prompt_logprobs", self.prompt_logprobs if output.index == 0 else None),
            "stats": output.stats,
            **({"pools": self.drops} if self.drops else {}),
        }


def _reported(field: str, logprobs: Sequence[TokenLogprobs] | None) -> dict[str, Any]:
    if logprobs is None:
        return {}
    return {field: [_logprob_record(entry) for entry in logprobs]}


def _logprob_record(entry: TokenLogprobs) -> dict[str, Any]:
    top = [{"token_id": token, "logprob": logprob} for token, logprob in entry.top]
    return {"token_id": entry.token, "logprob": entry.logprob, "rank": entry.rank, "top": top}


def _serve_rows(
    engine: Engine, params: SamplingParams, rows: Sequence[Row], printer: Printer, handling: Handling
) -> bool:
    printer.begin(engine.memory.describe())
    served = failed = 0
    with shown_when_slow(printer.progress(len(rows))) as bar, timeline(handling.profile):
        task = bar.add_task("rows", total=len(rows))
        for outcome in run_rows(engine, rows, params, handling):
            if isinstance(outcome, BadRow):
                report(outcome)
                failed += outcome.failed
            else:
                printer.row(outcome)
                served += 1
            bar.advance(task)
    pacing = engine.pacing()
    printer.end(pacing)
    warn_of_overruns(pacing)
    if failed:
        raise EngineError(f"{failed} of {len(rows)} rows failed")
    return served == len(rows)


@contextmanager
def timeline(path: Path | None) -> Iterator[None]:
    """Record every operation meanwhile into a file that Perfetto and chrome://tracing open; nothing without a path."""
    if path is None:
        yield
        return
    import torch
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as recorded:
        yield
    recorded.export_chrome_trace(str(path))


def run_rows(
    engine: Engine,
    rows: Iterable[Row],
    params: SamplingParams,
    handling: Handling,
) -> Iterator[Finished | BadRow]:
    """Each row as it ends, at most `handling.concurrency` of them submitted. One that cannot be served harms no
    other."""
    waiting = deque(rows)
    running: dict[str, tuple[Row, list[Sample]]] = {}
    while waiting or running:
        while waiting and len(running) < handling.concurrency:
            row = waiting.popleft()
            try:
                prompt = prompt_of(row, engine.tokenizer, raw=handling.raw)
                running[row.place] = row, engine.submit(prompt, params, handling.cache_salt)
            except InputError as error:
                yield BadRow(row.place, str(error))
        if running:
            engine.step()
        ended = [place for place, (_, samples) in running.items() if all(map(_has_ended, samples))]
        for place in ended:
            yield _outcome(*running.pop(place), engine.drops())


def _has_ended(sample: Sample) -> bool:
    return sample.finish_reason is not None


def _outcome(row: Row, samples: list[Sample], drops: dict[str, dict[str, int]]) -> Finished | BadRow:
    from pilotfish.engine.llm import first_error, request_output

    if (error := first_error(samples)) is not None:
        return BadRow(row.place, str(error), failed=True)
    output = request_output(samples)
    return Finished(row, len(output.prompt_token_ids), output.outputs, output.prompt_logprobs, drops)
