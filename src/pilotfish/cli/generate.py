from __future__ import annotations

import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from pilotfish.cli.options import ENGINE, SAMPLING, JsonOption, engine_config
from pilotfish.cli.show import paced, print_json, progress_bar, started, table_of, warn_line, warn_of_overruns
from pilotfish.command import Given, taking
from pilotfish.config.engine import EngineConfig
from pilotfish.core.sampling.constraint import Constraint
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import TokenLogprobs
from pilotfish.core.scheduling.request import check_cache_salt
from pilotfish.errors import EngineError, InputError, ParameterError
from pilotfish.files import file_text
from pilotfish.options import check_options, option, pick
from pilotfish.printable import printable, printable_output
from pilotfish.prompts import BadRow, Row, marks_turns, prompt_of, read_rows

if TYPE_CHECKING:  # imports torch
    from pilotfish.engine.engine import Engine
    from pilotfish.engine.llm import RequestOutput
    from pilotfish.engine.sample import Sample
    from pilotfish.model.pacer import Pacer

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
    """One kind of constraint at most."""

    json_schema: Annotated[Path, structured("JSON that the schema in this file allows.", metavar="FILE")] | None = None
    regex: Annotated[str, structured("What the expression matches as a whole.")] | None = None
    grammar: (
        Annotated[Path, structured("What the Lark or GBNF grammar in this file derives.", metavar="FILE")] | None
    ) = None
    choice: Annotated[Sequence[str], structured("One of these texts.", metavar="TEXT")] = ()

    def constraint(self) -> Constraint | None:
        given = [name.replace("_", "-") for name, value in vars(self).items() if value]
        if len(given) > 1:
            raise InputError(f"{given[1]}: it cannot be combined with --{given[0]}; give one of them")
        if self.json_schema is not None:
            return Constraint.json(file_text("json_schema", self.json_schema), compact=True)
        if self.grammar is not None:
            return Constraint.grammar(file_text("grammar", self.grammar))
        if self.regex is not None:
            return Constraint.regex(self.regex)
        return Constraint.choice(self.choice) if self.choice else None


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
    if (prompt is None) == (prompts is None):
        raise InputError("prompt: exactly one of --prompt and --prompts is needed")
    rows = [Row("prompt", (prompt or "",), chat=False, place=COMMAND_LINE)] if prompts is None else read_rows(prompts)
    config = engine_config(engine, max_requests=max(how.concurrency, EngineConfig.max_requests))
    good = [row for row in rows if isinstance(row, Row)]
    for row in rows:
        if isinstance(row, BadRow):
            report(row)
    served = bool(good) and _generate(config, sampling, good, Printer(json=json), how)
    if not served or len(good) < len(rows):
        raise typer.Exit(2)


def _generate(config: EngineConfig, sampling: Given, rows: Sequence[Row], printer: Printer, handling: Handling) -> bool:
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


# -- output


def report(row: BadRow) -> None:
    warn_line(f"{row.place}: {row.reason}")


class Printer:
    def __init__(self, *, json: bool) -> None:
        self._json, self._records = json, list[dict[str, Any]]()
        self._console = Console(highlight=False)
        #: Where progress is shown: beside JSON on a terminal nowhere.
        self.progress: Console | None = Console(stderr=True)
        if self._console.is_terminal:
            self.progress = None if json else self._console

    def begin(self, *about: str) -> None:
        if not self._json:
            self._dim("\n".join(about))

    def output(self, record: dict[str, Any]) -> None:
        if self._json:
            print_json(record)
            return
        self._records.append(record)
        self._console.print(Rule(Text(f"{_name(record)} · seed {record['seed']}"), align="left", style="dim"))
        if self._console.is_terminal:
            self._console.print(Text(printable_output(record["text"])), soft_wrap=True)
        else:  # rich would drop and expand control characters
            self._console.file.write(f"{record['text']}\n")

    def end(self, pacing: Sequence[Pacer]) -> None:
        if self._json:
            return
        if self._records:
            self._console.print(table_of(map(_cells, self._records)))
        counts = sum((Counter(one["stats"]["accepted_by_origin"]) for one in self._records), Counter[str]())
        if counts:
            guessers = ", ".join(f"{name} {count}" for name, count in counts.most_common())
            self._dim(f"accepted, guessed by: {guessers}")
        if pacing:
            self._console.print(paced(pacing))

    def _dim(self, text: str) -> None:
        self._console.print(Text(text, style="dim"), soft_wrap=True)


def _name(record: dict[str, Any]) -> str:
    return printable(f"{record['id']} [{record['index']}]" if "index" in record else str(record["id"]))


def _cells(record: dict[str, Any]) -> dict[str, object]:
    stats = record["stats"]
    return {
        "id": _name(record),
        "prompt": record["prompt_tokens"],
        "tokens": len(record["token_ids"]),
        "end": record["finish_reason"],
        "seconds": f"{stats['seconds']:.2f}",
        "tokens/s": f"{stats['tokens_per_second']:.1f}",
        "per step": f"{stats['tokens_per_verify_step']:.2f}",
        "accepted": f"{stats['accepted_tokens']} of {stats['draft_tokens']}",
    }


# -- the rows


def timeline(path: Path | None) -> AbstractContextManager[Any]:
    if path is None:
        return nullcontext()
    from torch.profiler import profile

    return profile(on_trace_ready=lambda recorded: recorded.export_chrome_trace(str(path)))


def run_rows(
    engine: Engine, rows: Iterable[Row], params: SamplingParams, handling: Handling
) -> Iterator[list[dict[str, Any]] | BadRow]:
    """Yields each row's outputs as it ends. A bad row harms no other."""
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
                yield records(row, request_output(samples), engine.drops(), exact=engine.exact)


def records(
    row: Row, result: RequestOutput, drops: Mapping[str, Mapping[str, int]], *, exact: bool
) -> list[dict[str, Any]]:
    """`drops`: of draft pools' messages, since the engine started."""
    return [
        {
            "id": row.id,
            **({"index": output.index} if len(result.outputs) > 1 else {}),
            "prompt_tokens": len(result.prompt_token_ids),
            "token_ids": output.token_ids,
            "text": output.text,
            "finish_reason": output.finish_reason,
            "seed": output.seed,
            "exact": exact,
            **_reported("logprobs", output.logprobs),
            **_reported("prompt_logprobs", result.prompt_logprobs if output.index == 0 else None),
            "stats": output.stats,
            **({"pools": drops} if drops else {}),
        }
        for output in result.outputs
    ]


def _reported(field: str, logprobs: Sequence[TokenLogprobs] | None) -> dict[str, Any]:
    if logprobs is None:
        return {}
    tops = [[{"token_id": token, "logprob": logprob} for token, logprob in entry.top] for entry in logprobs]
    entries = zip(logprobs, tops, strict=True)
    return {field: [{"token_id": e.token, "logprob": e.logprob, "rank": e.rank, "top": top} for e, top in entries]}
