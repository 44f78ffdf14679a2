"""`pilotfish generate`: prompts in, one output a row."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from pilotfish.cli.options import EngineOptions, Handling, JsonOption, SamplingOptions, sampled
from pilotfish.cli.show import JsonPrinter, TextPrinter, report
from pilotfish.command import taking
from pilotfish.config import EngineConfig
from pilotfish.core.request import check_cache_salt
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.errors import InputError, ParameterError
from pilotfish.prompts import BadRow, Row, read_rows

MAX_CONCURRENCY = 4096
rows = partial(typer.Option, rich_help_panel="How rows are run")


@taking(EngineOptions, SamplingOptions)
def generate(
    engine: EngineOptions,
    sampling: SamplingOptions,
    prompt: Annotated[str | None, typer.Option(help="One prompt, taken as it is.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON Lines of {id, prompt} or {id, turns}.")] = None,
    n: Annotated[int | None, sampled("--n", help="Outputs of each prompt.")] = None,
    logprobs: Annotated[int | None, sampled(help="Report log-probabilities, of the n likeliest too.")] = None,
    prompt_logprobs: Annotated[int | None, sampled(help="The same for the prompt's tokens.")] = None,
    cache_salt: Annotated[str | None, rows(help="The tenant from whose outputs suffix guesses.")] = None,
    concurrency: Annotated[int, rows(help="Rows that run at a time.")] = 1,
    raw: Annotated[bool, rows("--raw", help="Apply no chat template to turns.")] = False,
    profile: Annotated[Path | None, rows(help="Write a timeline of all operations to this file.")] = None,
    json: JsonOption = False,
) -> None:
    """Continue prompts. With --json one object a line: id, token_ids, text, finish_reason, seed, stats."""
    own = {"n": n, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    given = {**sampling.given(), **{name: value for name, value in own.items() if value is not None}}
    SamplingParams(**given)  # what cannot be is refused before a model is loaded
    check_cache_salt(cache_salt)
    if not 1 <= concurrency <= MAX_CONCURRENCY:
        raise ParameterError("concurrency", concurrency, f"an integer 1 to {MAX_CONCURRENCY}")
    if not json and (logprobs is not None or prompt_logprobs is not None):
        raise InputError("logprobs: they are reported with --json only")
    if profile is not None and not profile.parent.is_dir():
        raise ParameterError("profile", str(profile), "a file in a directory that exists")
    rows = _rows(prompt, prompts)
    config = engine.config(concurrency)
    handling = Handling(cache_salt=cache_salt, concurrency=concurrency, raw=raw, profile=profile)
    if not _run(config, given, rows, handling, json=json):
        raise typer.Exit(2)


def _rows(prompt: str | None, prompts: Path | None) -> list[Row | BadRow]:
    if (prompt is None) == (prompts is None):
        raise InputError("prompt: exactly one of --prompt and --prompts is needed")
    if prompts is not None:
        return read_rows(prompts)
    return [Row("prompt", (prompt or "",), chat=False, place="pilotfish")]


def _run(
    config: EngineConfig,
    sampling: dict[str, Any],
    rows: list[Row | BadRow],
    handling: Handling,
    *,
    json: bool,
) -> bool:
    """Run the rows that can be run; whether that was all of them."""
    good = [row for row in rows if isinstance(row, Row)]
    for row in rows:
        if isinstance(row, BadRow):
            report(row)
    if not good:
        return False
    from pilotfish.model.serving_imports import import_for_serving

    import_for_serving()
    from pilotfish.cli.batch import generate_rows

    printer = JsonPrinter() if json else TextPrinter()
    all_served = generate_rows(config, sampling, good, printer, handling)
    return all_served and len(good) == len(rows)
