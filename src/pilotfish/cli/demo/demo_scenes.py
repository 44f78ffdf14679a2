"""Scenes of the demo: all modes of a pair, compared; shown as text, tables, JSON."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.text import Text

from pilotfish.cli.demo.demo_pace import slower_scene
from pilotfish.cli.demo.demo_runs import ASYNC_SECONDS, PROMPTS, SECONDS, Scene, Show, Timing, Work, time_modes
from pilotfish.cli.demo.demo_tables import all_equal, record_of, show_table
from pilotfish.cli.show import DRAFTED, OWN, OriginStream, print_json, shows_colour, warn_of_overruns
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.model.pacer import Pacer

OPENING, CLOSING = "«", "»"  # around drafted tokens where there are no colours
#: Times that a pace which was not held is stretched again.
RETRIES = 2


def run_demo(scenes: Sequence[Scene], work: Work, *, rounds: int, json: bool, began: float) -> bool:
    """Show scenes, the first with its text; False if float32 outputs of two modes differ. `began` is of
    `time.perf_counter`."""
    console, records = Console(highlight=False), dict[str, dict[str, Any]]()
    for number, scene in enumerate(scenes):
        show = None if number or json else partial(stream, params=work.params, console=console)
        ran, record, pacing = _compare(scene, work, rounds, show, quiet=json)
        records[scene.name] = record
        if not json:
            show_table(ran, record, pacing, console)
        warn_of_overruns(pacing)
    seconds = time.perf_counter() - began
    if json:
        print_json({"temperature": work.params.temperature, "seconds": seconds, **records})
    else:
        console.print(f"the demo took {seconds:.0f} s")
    return all(record["dtype"] != "float32" or all_equal(record) for record in records.values())


def _compare(
    scene: Scene, work: Work, rounds: int, show: Show | None, *, quiet: bool
) -> tuple[Scene, dict[str, Any], list[Pacer]]:
    """The scene as it was run in the end. Async first, whose text is shown; then, on all cores, off and sync."""
    scene, own = _time_async(scene, work, rounds, show, quiet=quiet)
    others = time_modes(replace(scene.config, mode="sync"), own.work, rounds, seconds=SECONDS, quiet=quiet)
    pacing = [*own.pacing, *others.pacing]
    about = {
        "pair": scene.pair,
        "parameters": own.parameters,
        "dtype": own.dtype,
        "prompts": own.work.prompts,
        "max_tokens": own.work.params.max_tokens,
        "pace": scene.config.pace,
        "valid": all(pacer.valid for pacer in pacing),
    }
    return scene, {**about, **record_of(own.runs | others.runs, own.cores | others.cores)}, pacing


def _time_async(scene: Scene, work: Work, rounds: int, show: Show | None, *, quiet: bool) -> tuple[Scene, Timing]:
    """Again at a slower pace where the machine did not hold the scene's after all."""
    timing = time_modes(scene.config, work, rounds, seconds=ASYNC_SECONDS, show=show, quiet=quiet)
    for _ in range(RETRIES):
        if timing.valid or scene.stretch is None:
            break
        scene = slower_scene(scene, timing.pacing)
        timing = time_modes(scene.config, work, rounds, seconds=ASYNC_SECONDS, quiet=quiet)
    return scene, timing


# -- tokens, coloured by origin


def stream(engine: Engine, params: SamplingParams, console: Console) -> None:
    """Print a text as it is written, coloured by who wrote it."""
    coloured, prompt = shows_colour(console), str(PROMPTS[0].text)
    console.print(_legend(coloured))
    console.print(Text(prompt, style="dim"), end="", soft_wrap=True)
    for piece in _pieces(engine, prompt, params, coloured=coloured):
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
