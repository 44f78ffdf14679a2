"""What the demo does and how it shows it."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pilotfish.cli.compare import Comparison, Summary, compare, run_pass, speculation_off
from pilotfish.cli.origin import DRAFTED, OWN, OriginStream, shows_colour
from pilotfish.cli.show import paced, status, warn_of_overruns
from pilotfish.config import EngineConfig
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.engine.engine import Delta, Engine

PROMPTS = (
    'def mean(values: list[float]) -> float:\n    """Return the arithmetic mean of a non-empty list."""\n',
    "class Stack:\n"
    '    """A last-in, first-out collection."""\n\n'
    "    def __init__(self):\n"
    "        self._items = []\n\n"
    "    def push(self, item):\n",
    "import os\n\n\n"
    "def find_files(directory, suffix):\n"
    '    """Yield the paths below directory whose names end with suffix."""\n',
)
WARM_UP_TOKENS = 4
MEASURE_SECONDS = 40.0  # rounds that would end later are left out
DEPTHS_SHOWN = 8
OPENING, CLOSING = "«", "»"  # around drafted tokens where there are no colours


def run_demo(pair: str, config: EngineConfig, params: SamplingParams, *, rounds: int, json: bool) -> bool:
    """Show it; False when float32 outputs of off and sync differ."""
    with _status(f"loading {pair}", quiet=json):
        engine = Engine(config)
        _warm_up(engine, params)
    console = Console(highlight=False)
    if not json:
        _stream(engine, params, console)
    with _status("timing off and sync", quiet=json):
        result = compare(engine, PROMPTS, params, rounds=rounds, budget=MEASURE_SECONDS)
    pacing = engine.pacing()
    if json:
        record = {"pair": pair, **_settings(engine, params), **_result(result)}
        sys.stdout.write(json_module.dumps(record) + "\n")
    else:
        console.print(_table(result))
        console.print(_verdict(result, engine.config.dtype))
        if pacing:
            console.print(paced(pacing))
    warn_of_overruns(pacing)
    return result.matched == result.sequences or config.dtype != "float32"


def _status(message: str, *, quiet: bool) -> AbstractContextManager[Any]:
    return nullcontext() if quiet else status(message)


def _warm_up(engine: Engine, params: SamplingParams) -> None:
    """Whatever happens once happens now."""
    short = replace(params, max_tokens=min(params.max_tokens, WARM_UP_TOKENS))
    run_pass(engine, PROMPTS[:1], short)
    with speculation_off(engine):
        run_pass(engine, PROMPTS[:1], short)


# -- tokens, coloured by origin


def _stream(engine: Engine, params: SamplingParams, console: Console) -> None:
    coloured = shows_colour(console)
    console.print(_legend(coloured))
    console.print(Text(PROMPTS[0], style="dim"), end="", soft_wrap=True)
    for piece in _pieces(engine, PROMPTS[0], params, coloured=coloured):
        console.print(piece, end="", soft_wrap=True)
    console.print("\n")


def _legend(coloured: bool) -> Text:
    if not coloured:
        return Text(f"{OPENING}guessed by the draft, accepted by the target{CLOSING}, the target's own\n")
    parts = ("guessed by the draft, accepted by the target", DRAFTED), (" · ", "dim"), ("the target's own", OWN)
    return Text.assemble(*parts, (" · prompt\n", "dim"))


def _pieces(engine: Engine, prompt: str, params: SamplingParams, *, coloured: bool) -> Iterator[Text]:
    """The text of each step as the engine commits it."""
    origins = OriginStream(engine.tokenizer, params)
    engine.submit(prompt, params)
    while engine.busy:
        for delta in engine.step():
            yield origins.coloured(delta) if coloured else _bracketed(delta, origins.drafted(delta))


def _bracketed(delta: Delta, end: int) -> Text:
    drafted, own = delta.text[:end], delta.text[end:]
    return Text((f"{OPENING}{drafted}{CLOSING}" if drafted else "") + own)


# -- figures


def _table(result: Comparison) -> Table:
    table = Table(title="the same target, without and with a draft", title_justify="left", box=None, pad_edge=False)
    table.add_column()
    table.add_column("off", justify="right")
    table.add_column("sync", justify="right")
    table.add_row("tokens/s, median", *(f"{s.tokens_per_second:.1f}" for s in (result.off, result.sync)), style="bold")
    table.add_row("  slowest to fastest round", _spread(result.off), _spread(result.sync))
    table.add_row("tokens per verify step", *(f"{s.tokens_per_verify_step:.2f}" for s in (result.off, result.sync)))
    for part in result.off.time_share:
        table.add_row(f"time: {part}", *(f"{s.time_share[part]:.0%}" for s in (result.off, result.sync)))
    depths = zip(result.sync.accepted_by_depth, result.sync.offered_by_depth, strict=True)
    for depth, (accepted, offered) in enumerate(islice(depths, DEPTHS_SHOWN), 1):
        table.add_row(f"accepted at depth {depth}", "", f"{accepted} of {offered} · {accepted / offered:4.0%}")
    return table


def _spread(summary: Summary) -> str:
    return f"{min(summary.speeds):.1f} to {max(summary.speeds):.1f}"


def _verdict(result: Comparison, dtype: str) -> Text:
    equal = result.matched == result.sequences
    tokens = f"{result.matched} of {result.sequences} outputs equal token for token ({dtype})"
    return Text(f"\nsync is {result.speedup:.2f} times as fast; {tokens}", style="bold" if equal else "bold yellow")


def _settings(engine: Engine, params: SamplingParams) -> dict[str, Any]:
    config = engine.config
    return {
        "parameters": engine.model.num_parameters,
        "dtype": config.dtype,
        "threads": config.num_threads,
        "pace": config.pace,
        "temperature": params.temperature,
        "max_tokens": params.max_tokens,
        "prompts": len(PROMPTS),
    }


def _result(result: Comparison) -> dict[str, Any]:
    return {
        "off": result.off.record(),
        "sync": result.sync.record(),
        "speedup": result.speedup,
        "sequences": result.sequences,
        "matched": result.matched,
    }
