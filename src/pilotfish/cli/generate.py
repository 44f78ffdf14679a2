"""`pilotfish generate`: prompts in, one output a row."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pilotfish.cli.options import ENGINE, SAMPLING, JsonOption, engine_config
from pilotfish.cli.show import JsonPrinter, Printer, TextPrinter, progress_bar, report, started, warn_of_overruns
from pilotfish.command import Given, taking
from pilotfish.config.engine import EngineConfig
from pilotfish.core.sampling.constraint import Constraint
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import TokenLogprobs
from pilotfish.core.scheduling.request import check_cache_salt
from pilotfish.errors import EngineError, InputError, ParameterError
from pilotfish.options import check_options, option, pick
from pilotfish.prompts import BadRow, Row, marks_turns, prompt_of, read_rows

if TYPE_CHECKING:  # imports torch
    from pilotfish.engine.engine import Engine
    from pilotfish.engine.llm import RequestOutput
    from pilotfish.engine.sample import Sample

rows = partial(option, panel="How rows are run")
structured = partial(option, panel="What the output must be")
COMMAND_LINE = "pilotfish"  # the place of its prompt
UNTEMPLATED = (
    "the prompt is sent as it is, without the model's chat template; `pilotfish chat` applies it, "
    "and so does --prompts to turns"
)


@dataclass(frozen=True, kw_only=True)
class Handling:
    cache_salt: Annotated[str, rows("The tenant from whose outputs suffix guesses.")] | None = None
    concurrency: Annotated[int, rows("Rows that run at a time.", 1, 4096)] = 1
    raw: Annotated[bool, rows("Apply no chat template to turns.")] = False
    profile: Annotated[Path, rows("Write a timeline of all operations to this file.")] | None = None

    def __post_init__(self) -> None:
        check_options(self)
        check_cache_salt(self.cache_salt)
        if self.profile is not None and not self.profile.parent.is_dir():
            raise ParameterError("profile", str(self.profile), "a file in a directory that exists")


@dataclass(frozen=True, kw_only=True)
class Structure:
    """What each output must be: one of them at most."""

    json_schema: Annotated[Path, structured("JSON that the schema in this file allows.", metavar="FILE")] | None = None
    regex: Annotated[str, structured("What the expression matches as a whole.")] | None = None
    grammar: (
        Annotated[Path, structured("What the Lark or GBNF grammar in this file derives.", metavar="FILE")] | None
    ) = None
    choice: Annotated[Sequence[str], structured("One of these texts.", metavar="TEXT")] = ()

    def constraint(self) -> Constraint | None:
        """InputError for several, and for what cannot be read."""
        given = [name.replace("_", "-") for name, value in vars(self).items() if value]
        if len(given) > 1:
            raise InputError(f"{given[1]}: it cannot be combined with --{given[0]}; give one of them")
        if self.json_schema is not None:
            return Constraint.json(_text_of("json_schema", self.json_schema), compact=True)
        if self.grammar is not None:
            return Constraint.grammar(_text_of("grammar", self.grammar))
        if self.regex is not None:
            return Constraint.regex(self.regex)
        return Constraint.choice(self.choice) if self.choice else None


def _text_of(field: str, path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ParameterError(field, str(path), f"a file that can be read ({why})") from error


@taking(ENGINE, SAMPLING, pick(Structure), pick(Handling))
def generate(
    engine: Given,
    sampling: Given,
    structure: Given,
    handling: Given,
    prompt: Annotated[str | None, typer.Option(help="One prompt, taken as it is.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="JSON Lines of {id, prompt} or {id, turns}.")] = None,
    json: JsonOption = False,
) -> None:
    """Continue prompts. With --json one object a line: id, token_ids, text, finish_reason, seed, stats."""
    sampling["structured_outputs"] = Structure(**structure).constraint()
    SamplingParams(**sampling)  # checked before a model is loaded
    how = Handling(**handling)
    if not json and ("logprobs" in sampling or "prompt_logprobs" in sampling):
        raise InputError("logprobs: they are reported with --json only")
    rows = _rows(prompt, prompts)
    config = engine_config(engine, max_requests=max(how.concurrency, EngineConfig.max_requests))
    good = [row for row in rows if isinstance(row, Row)]
    for row in rows:
        if isinstance(row, BadRow):
            report(row)
    served = bool(good) and _generate(config, sampling, good, JsonPrinter() if json else TextPrinter(), how)
    if not served or len(good) < len(rows):
        raise typer.Exit(2)


def _rows(prompt: str | None, prompts: Path | None) -> list[Row | BadRow]:
    if (prompt is None) == (prompts is None):
        raise InputError("prompt: exactly one of --prompt and --prompts is needed")
    if prompts is not None:
        return read_rows(prompts)
    return [Row("prompt", (prompt or "",), chat=False, place=COMMAND_LINE)]


def _generate(config: EngineConfig, sampling: Given, rows: Sequence[Row], printer: Printer, handling: Handling) -> bool:
    """Load the models and print each row as it ends. Returns whether all rows could be served."""
    served = failed = 0
    with started(config) as engine:
        params = engine.sampling_params(**sampling)
        if rows[0].place == COMMAND_LINE and not handling.raw and marks_turns(engine.tokenizer):
            sys.stderr.write(f"{COMMAND_LINE}: {UNTEMPLATED}\n")
        printer.begin(str(engine.precision), engine.memory.describe())
        with progress_bar(printer.progress, len(rows)) as advance, timeline(handling.profile):
            for outcome in run_rows(engine, rows, params, handling):
                if isinstance(outcome, BadRow):
                    report(outcome)
                    failed += outcome.failed
                else:
                    for record in outcome:
                        printer.output(record)
                    served += 1
                advance()
        printer.end(engine.pacing())
        warn_of_overruns(engine.pacing())
    if failed:
        raise EngineError(f"{failed} of {len(rows)} rows failed")
    return served == len(rows)


def timeline(path: Path | None) -> AbstractContextManager[Any]:
    """Record every operation meanwhile into a file that Perfetto and chrome://tracing open; nothing without a path."""
    if path is None:
        return nullcontext()
    from torch.profiler import profile

    return profile(on_trace_ready=lambda recorded: recorded.export_chrome_trace(str(path)))


def run_rows(
    engine: Engine, rows: Iterable[Row], params: SamplingParams, handling: Handling
) -> Iterator[list[dict[str, Any]] | BadRow]:
    """The outputs of each row as it ends, at most `handling.concurrency` at a time. A row that cannot be served
    harms no other."""
    from pilotfish.engine.llm import first_error, request_output

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
        ended = [place for place, (_, samples) in running.items() if all(s.finish_reason is not None for s in samples)]
        for place in ended:
            row, samples = running.pop(place)
            if (failure := first_error(samples)) is not None:
                yield BadRow(row.place, str(failure), failed=True)
            else:
                yield records(row, request_output(samples), engine.drops())


def records(row: Row, result: RequestOutput, drops: Mapping[str, Mapping[str, int]]) -> list[dict[str, Any]]:
    """A JSON object for each output, with an `index` if there are several. `drops`: of draft pools' messages, since the
    engine started."""
    return [
        {
            "id": row.id,
            **({"index": output.index} if len(result.outputs) > 1 else {}),
            "prompt_tokens": len(result.prompt_token_ids),
            "token_ids": output.token_ids,
            "text": output.text,
            "finish_reason": output.finish_reason,
            "seed": output.seed,
            **_reported("logprobs", output.logprobs),
            **_reported("prompt_logprobs", result.prompt_logprobs if output.index == 0 else None),
            "stats": output.stats,
            **({"pools": drops} if drops else {}),
        }
        for output in result.outputs
    ]


def _reported(field: str, logprobs: Sequence[TokenLogprobs] | None) -> dict[str, Any]:
    return {} if logprobs is None else {field: [_logprob_record(entry) for entry in logprobs]}


def _logprob_record(entry: TokenLogprobs) -> dict[str, Any]:
    top = [{"token_id": token, "logprob": logprob} for token, logprob in entry.top]
    return {"token_id": entry.token, "logprob": entry.logprob, "rank": entry.rank, "top": top}
