"""`pilotfish demo`: speculation at work, and what it is worth, in under two minutes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from pilotfish import pairs
from pilotfish.cli.compare import Comparison, RunMode, Summary, comparison_table, run_pass, run_plain_pass, run_rounds
from pilotfish.cli.demo_pace import measure
from pilotfish.cli.options import JsonOption
from pilotfish.cli.show import DRAFTED, OWN, OriginStream, paced, print_json, shows_colour, status, warn_of_overruns
from pilotfish.command import Given, taking
from pilotfish.config import EngineConfig
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.errors import ParameterError
from pilotfish.options import pick

if TYPE_CHECKING:  # imports torch
    from pilotfish.engine.engine import Engine
    from pilotfish.model.pacer import Pacing

PAIR = "pycode@344m"
#: A target and a draft that are quick enough to take the time of others.
PACED_PAIR = "pycode"
AUTO = "auto"
MAX_ROUNDS = 100
ENGINE = ("dtype", "device", "threads", "eager")
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
OPENING, CLOSING = "«", "»"  # around drafted tokens where there are no colours


@taking(pick(SamplingParams, "max_tokens", "temperature", max_tokens=64, temperature=0.8), pick(EngineConfig, *ENGINE))
def demo(
    sampling: Given,
    engine: Given,
    pair: Annotated[str, typer.Option(help="Of the second table, at its own speed: pycode, or pycode@<N>m.")] = PAIR,
    rounds: Annotated[int, typer.Option(help="Timed rounds of each mode, at most.")] = 3,
    pace: Annotated[
        str,
        typer.Option(help="Of the first table: the devices that pycode emulates; auto: what is held here."),
    ] = AUTO,
    json: JsonOption = False,
) -> None:
    """Write code with a draft guessing ahead, coloured by who wrote each token; then time off, sync and async: at the
    pace of a 70B and a 1B model (slower, in the same proportion, where this machine would not keep up), and at this
    machine's own."""
    if not 1 <= rounds <= MAX_ROUNDS:
        raise ParameterError("rounds", rounds, f"an integer 1 to {MAX_ROUNDS}")
    if not pace:
        raise ParameterError("pace", pace, f"{AUTO}, or paces as in target=10.4ms,draft=2.6ms")
    params = SamplingParams(**sampling, seed=0)
    paced, unpaced = _config(PACED_PAIR, "" if pace == AUTO else pace, engine), _config(pair, "", engine)
    from pilotfish.model.serving_imports import import_for_serving

    import_for_serving()
    note = ""
    if pace == AUTO:
        with status("measuring what pace this machine holds", quiet=json):
            held = measure(paced, PROMPTS, params).held
        paced, note = replace(paced, pace=held.text), held.note
    scenes = [
        Scene("paced", f"{PACED_PAIR} at the pace of other devices: {paced.pace}{note}", PACED_PAIR, paced),
        Scene("unpaced", f"{pair} at the speed of this machine", pair, unpaced),
    ]
    if not run_demo(scenes, params, rounds=rounds, json=json):
        raise typer.Exit(1)


def _config(pair: str, pace: str, engine: Given) -> EngineConfig:
    models = pairs.resolve_pair(pair)
    return EngineConfig(target=models.target, draft=models.draft, mode="async", pace=pace, **engine)


@dataclass(frozen=True)
class Scene:
    """A pair at some speed: one table of all modes."""

    name: str  # of its object in JSON
    title: str
    pair: str
    config: EngineConfig  # of mode async


@dataclass(frozen=True)
class Result:
    scene: Scene
    comparison: Comparison
    parameters: int  # of the target
    pacing: list[Pacing]

    @property
    def passed(self) -> bool:
        """Float32 promises equal outputs; of lower precision they are only counted."""
        return self.comparison.equal or self.scene.config.dtype != "float32"


def run_demo(scenes: Sequence[Scene], params: SamplingParams, *, rounds: int, json: bool) -> bool:
    """Show scenes, the first with its text; False if float32 outputs of two modes differ."""
    console = Console(highlight=False)
    results = []
    for number, scene in enumerate(scenes):
        streamed = console if number == 0 and not json else None
        results.append(_run_scene(scene, params, rounds, streamed, quiet=json))
        if not json:
            _show(results[-1], console)
        warn_of_overruns(results[-1].pacing)
    if json:
        settings = {"temperature": params.temperature, "max_tokens": params.max_tokens, "prompts": len(PROMPTS)}
        records = {result.scene.name: _record(result) for result in results}
        print_json({"dtype": scenes[0].config.dtype, **settings, **records})
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
        modes = {"off": partial(run_plain_pass, engine, PROMPTS), "sync": partial(run_pass, engine, PROMPTS)}
        summaries |= _timed(scene, modes, params, rounds, quiet=quiet)
        pacing += engine.pacing()
        return Result(scene, Comparison.of(summaries), engine.model.num_parameters, pacing)


@contextmanager
def _engine(scene: Scene, config: EngineConfig, params: SamplingParams, *, quiet: bool) -> Iterator[Engine]:
    """An engine that has been warmed up, and is gone afterwards with its cores and processes."""
    where = "a process of its own" if config.mode == "async" else "the target's process"
    with ExitStack() as stack:
        with status(f"{scene.pair}: loading, the draft in {where}", quiet=quiet):
            from pilotfish.engine.engine import Engine

            engine = stack.enter_context(Engine(config))
            _warm_up(engine, params)
        yield engine


def _timed(
    scene: Scene, modes: Mapping[str, RunMode], params: SamplingParams, rounds: int, *, quiet: bool
) -> dict[str, Summary]:
    with status(f"{scene.pair}: timing {' and '.join(modes)}", quiet=quiet):
        return run_rounds(modes, params, rounds=rounds, budget=MEASURE_SECONDS)


def _warm_up(engine: Engine, params: SamplingParams) -> None:
    """Run everything once that is slow the first time."""
    short = replace(params, max_tokens=min(params.max_tokens, WARM_UP_TOKENS))
    run_pass(engine, PROMPTS[:1], short)
    run_plain_pass(engine, PROMPTS[:1], short)


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
    origins = OriginStream()
    engine.submit(prompt, params)
    while engine.busy:
        for delta in engine.step():
            yield origins.coloured(delta) if coloured else _bracketed(*origins.parts(delta))


def _bracketed(drafted: str, own: str) -> Text:
    return Text((f"{OPENING}{drafted}{CLOSING}" if drafted else "") + own)


# -- figures


def _show(result: Result, console: Console) -> None:
    console.print(comparison_table(result.scene.title, result.comparison.modes))
    console.print(_verdict(result))
    if result.pacing:
        console.print(paced(result.pacing))
    console.print()


def _verdict(result: Result) -> Text:
    comparison = result.comparison
    speeds = ", ".join(f"{mode} {comparison.speedup(mode):.2f}" for mode in comparison.others)
    matched = sum(map(comparison.matched, comparison.others))
    total = comparison.sequences * len(comparison.others)
    equal = f"{matched} of {total} outputs equal token for token ({result.scene.config.dtype})"
    return Text(f"\ntimes off: {speeds}; {equal}", style="bold" if comparison.equal else "bold yellow")


def _record(result: Result) -> dict[str, Any]:
    scene = {"pair": result.scene.pair, "parameters": result.parameters, "pace": result.scene.config.pace}
    return {**scene, **result.comparison.record()}
