"""What the demo does and how it shows it."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, zip_longest
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pilotfish.cli.compare import Comparison, Pass, RunMode, Summary, run_pass, run_rounds, speculation_off
from pilotfish.cli.demo_pace import HeldPace, measure
from pilotfish.cli.origin import DRAFTED, OWN, OriginStream, shows_colour
from pilotfish.cli.show import paced, status, warn_of_overruns
from pilotfish.config import EngineConfig
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.engine.sample import SampleDelta
from pilotfish.model.pacer import Pacing
from pilotfish.printable import printable_output

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
MEASURE_SECONDS = 16.0  # of each engine; rounds that would end later are left out
DEPTHS_SHOWN = 8
OPENING, CLOSING = "«", "»"  # around drafted tokens where there are no colours


@dataclass(frozen=True)
class Scene:
    """A pair at some speed: one table of all modes."""

    name: str  # of its object in JSON
    title: str
    pair: str
    config: EngineConfig  # of mode async


@dataclass(frozen=True)
class Result:
    """What came of a scene."""

    scene: Scene
    comparison: Comparison
    parameters: int  # of the target
    pacing: list[Pacing]

    @property
    def passed(self) -> bool:
        """Float32 promises equal outputs; of lower precision they are only counted."""
        return self.comparison.equal or self.scene.config.dtype != "float32"


def held_pace(config: EngineConfig, params: SamplingParams, *, quiet: bool) -> HeldPace:
    """The fastest pace of a 70B and a 1B model that this machine holds, or one slower in the same proportion."""
    with _status("measuring what pace this machine holds", quiet=quiet):
        return measure(config, PROMPTS, params).held


def run_demo(scenes: Sequence[Scene], params: SamplingParams, *, rounds: int, json: bool) -> bool:
    """Show them, the first with its text; False when float32 outputs of two modes differ."""
    console = Console(highlight=False)
    results = []
    for number, scene in enumerate(scenes):
        streamed = console if number == 0 and not json else None
        results.append(_run_scene(scene, params, rounds, streamed, quiet=json))
        if not json:
            _show(results[-1], console)
        warn_of_overruns(results[-1].pacing)
    if json:
        record = {**_settings(scenes[0], params), **{result.scene.name: _record(result) for result in results}}
        sys.stdout.write(json_module.dumps(record) + "\n")
    return all(result.passed for result in results)


def _run_scene(scene: Scene, params: SamplingParams, rounds: int, streamed: Console | None, *, quiet: bool) -> Result:
    """Async first, whose text is shown; then, on all cores, off and sync."""
    sync = replace(scene.config, mode="sync")
    with _engine(scene, scene.config, params, quiet=quiet) as engine:
        if streamed is not None:
            _stream(engine, params, streamed)
        modes = {"async": partial(run_pass, engine, PROMPTS)}
        summaries = _timed(scene, modes, params, rounds, quiet=quiet)
        pacing = [replace(one, role=f"async {one.role}") for one in engine.pacing()]
    with _engine(scene, sync, params, quiet=quiet) as engine:
        modes = {"off": partial(_plain_pass, engine), "sync": partial(run_pass, engine, PROMPTS)}
        summaries |= _timed(scene, modes, params, rounds, quiet=quiet)
        pacing += engine.pacing()
        return Result(scene, Comparison.of(summaries), engine.model.num_parameters, pacing)


@contextmanager
def _engine(scene: Scene, config: EngineConfig, params: SamplingParams, *, quiet: bool) -> Iterator[Engine]:
    """An engine that has been warmed up, and is gone afterwards with its cores and processes."""
    where = "a process of its own" if config.mode == "async" else "the target's process"
    with ExitStack() as stack:
        with _status(f"{scene.pair}: loading, the draft in {where}", quiet=quiet):
            engine = stack.enter_context(Engine(config))
            _warm_up(engine, params)
        yield engine


def _timed(
    scene: Scene, modes: Mapping[str, RunMode], params: SamplingParams, rounds: int, *, quiet: bool
) -> dict[str, Summary]:
    with _status(f"{scene.pair}: timing {' and '.join(modes)}", quiet=quiet):
        return run_rounds(modes, params, rounds=rounds, budget=MEASURE_SECONDS)


def _plain_pass(engine: Engine, params: SamplingParams) -> Pass:
    with speculation_off(engine):
        return run_pass(engine, PROMPTS, params)


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
    origins = OriginStream()
    engine.submit(prompt, params)
    while engine.busy:
        for delta in engine.step():
            yield origins.coloured(delta) if coloured else _bracketed(delta, origins.drafted(delta))


def _bracketed(delta: SampleDelta, end: int) -> Text:
    drafted, own = printable_output(delta.text[:end]), printable_output(delta.text[end:])
    return Text((f"{OPENING}{drafted}{CLOSING}" if drafted else "") + own)


# -- figures


def _show(result: Result, console: Console) -> None:
    console.print(_table(result))
    console.print(_verdict(result))
    if result.pacing:
        console.print(paced(result.pacing))
    console.print()


def _table(result: Result) -> Table:
    modes = result.comparison.modes
    summaries = list(modes.values())
    table = Table(title=result.scene.title, title_justify="left", box=None, pad_edge=False)
    table.add_column()
    for name in modes:
        table.add_column(name, justify="right")
    table.add_row("tokens/s, median", *(f"{s.tokens_per_second:.1f}" for s in summaries), style="bold")
    table.add_row("  slowest to fastest round", *map(_spread, summaries))
    table.add_row("tokens per verify step", *(f"{s.tokens_per_verify_step:.2f}" for s in summaries))
    table.add_row("cores of the target", *(str(s.cores) for s in summaries))
    for part in modes["off"].time_share:
        table.add_row(f"time: {part}", *(f"{s.time_share[part]:.0%}" for s in summaries))
    for origin in dict.fromkeys(name for s in summaries for name in s.accepted_by_origin):
        table.add_row(f"accepted, guessed by {origin}", *(_guessed(s, origin) for s in summaries))
    depths = zip_longest(*map(_accepted, summaries), fillvalue="")
    for depth, cells in enumerate(islice(depths, DEPTHS_SHOWN), 1):
        table.add_row(f"accepted at depth {depth}", *cells)
    return table


def _spread(summary: Summary) -> str:
    return f"{min(summary.speeds):.1f} to {max(summary.speeds):.1f}"


def _guessed(summary: Summary, origin: str) -> str:
    """Accepted tokens of an origin."""
    return str(summary.accepted_by_origin.get(origin, 0)) if summary.offered_by_depth else ""


def _accepted(summary: Summary) -> list[str]:
    """By depth."""
    depths = zip(summary.accepted_by_depth, summary.offered_by_depth, strict=True)
    return [f"{accepted} of {offered} · {accepted / offered:4.0%}" for accepted, offered in depths]


def _verdict(result: Result) -> Text:
    comparison = result.comparison
    speeds = ", ".join(f"{mode} {comparison.speedup(mode):.2f}" for mode in comparison.others)
    matched = sum(map(comparison.matched, comparison.others))
    total = comparison.sequences * len(comparison.others)
    equal = f"{matched} of {total} outputs equal token for token ({result.scene.config.dtype})"
    return Text(f"\ntimes off: {speeds}; {equal}", style="bold" if comparison.equal else "bold yellow")


def _settings(scene: Scene, params: SamplingParams) -> dict[str, Any]:
    """What all scenes share."""
    return {
        "dtype": scene.config.dtype,
        "temperature": params.temperature,
        "max_tokens": params.max_tokens,
        "prompts": len(PROMPTS),
    }


def _record(result: Result) -> dict[str, Any]:
    comparison = result.comparison
    return {
        "pair": result.scene.pair,
        "parameters": result.parameters,
        "pace": result.scene.config.pace,
        **{mode: summary.record() for mode, summary in comparison.modes.items()},
        "speedup": {mode: comparison.speedup(mode) for mode in comparison.others},
        "sequences": comparison.sequences,
        "matched": {mode: comparison.matched(mode) for mode in comparison.others},
    }
