"""Scenes of the demo: modes of a pair take turns on the same prompts and seeds, and are shown as text, tables, JSON."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, zip_longest
from operator import eq
from pathlib import Path
from statistics import median
from typing import Any, get_args

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pilotfish.bench.contestants import OFF, PLAIN, Run, contestant_of, joined, rates, take_turns
from pilotfish.bench.workload import Job, load_prompts
from pilotfish.cli.show import DRAFTED, OWN, OriginStream, paced, print_json, shows_colour, status, warn_of_overruns
from pilotfish.config import EngineConfig, Mode, available_cores
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.engine.memory import precision_here
from pilotfish.model.pacer import Pacer

PROMPTS = load_prompts(Path(__file__).with_name("demo.jsonl"))
WARM_UP_TOKENS = 4
MEASURE_SECONDS = 16.0  # of each engine; rounds that would end later are left out
OPENING, CLOSING = "«", "»"  # around drafted tokens where there are no colours
DEPTHS_SHOWN = 8

#: One run of jobs in a mode.
Play = Callable[[Sequence[Job]], Run]


@dataclass(frozen=True)
class Scene:
    """A pair at some speed: one table of all modes."""

    name: str  # of its object in JSON
    title: str
    pair: str
    config: EngineConfig  # of mode async

    @property
    def dtype(self) -> str:
        return precision_here(self.config, self.config.target).name


def run_demo(scenes: Sequence[Scene], params: SamplingParams, *, rounds: int, json: bool) -> bool:
    """Show scenes, the first with its text; False if float32 outputs of two modes differ."""
    console = Console(highlight=False)
    records = {}
    for number, scene in enumerate(scenes):
        streamed = console if number == 0 and not json else None
        records[scene.name], pacing = _run_scene(scene, params, rounds, streamed, quiet=json)
        if not json:
            _show(scene, records[scene.name], pacing, console)
        warn_of_overruns(pacing)
    dtype = scenes[0].dtype
    if json:
        settings = {"temperature": params.temperature, "max_tokens": params.max_tokens, "prompts": len(PROMPTS)}
        print_json({"dtype": dtype, **settings, **records})
    return dtype != "float32" or all(map(all_equal, records.values()))  # lower precision is only counted


def _run_scene(
    scene: Scene, params: SamplingParams, rounds: int, streamed: Console | None, *, quiet: bool
) -> tuple[dict[str, Any], list[Pacer]]:
    """Async first, whose text is shown; then, on all cores, off and sync."""
    runs, cores, pacing = dict[str, list[Run]](), dict[str, int](), list[Pacer]()
    for config in (scene.config, replace(scene.config, mode="sync")):
        where = "a process of its own" if config.mode == "async" else "the target's process"
        with ExitStack() as stack:
            with status(f"{scene.pair}: loading, the draft in {where}", quiet=quiet):
                engine = stack.enter_context(Engine(config))
                plays = _warm_plays(engine, params)
            if config.mode == "async" and streamed is not None:
                _stream(engine, params, streamed)
            with status(f"{scene.pair}: timing {' and '.join(plays)}", quiet=quiet):
                seeds = seeds_within(rounds, MEASURE_SECONDS)
                runs |= take_turns(plays, (jobs_of(replace(params, seed=seed)) for seed in seeds), warm_up=0)
            cores |= dict.fromkeys(plays, available_cores())
            pacing += [
                replace(one, role=f"async {one.role}") if config.mode == "async" else one for one in engine.pacing()
            ]
    models = {"pair": scene.pair, "parameters": engine.memory.target.parameters, "pace": scene.config.pace}
    return {**models, **record_of(runs, cores)}, pacing


def _warm_plays(engine: Engine, params: SamplingParams) -> dict[str, Play]:
    """The modes of an engine, its own and, unless that is async, off. Each has run everything once that is slow the
    first time."""
    mode, short = engine.config.mode, replace(params, max_tokens=min(params.max_tokens, WARM_UP_TOKENS))
    modes = {mode: contestant_of(engine)} if mode == "async" else {OFF: PLAIN, mode: contestant_of(engine)}
    plays: dict[str, Play] = {name: partial(one.run, engine, concurrency=1) for name, one in modes.items()}
    take_turns(plays, [jobs_of(short)[:1]])
    return plays


def jobs_of(params: SamplingParams) -> list[Job]:
    return [Job(prompt, "", params) for prompt in PROMPTS]


def seeds_within(rounds: int, seconds: float) -> Iterator[int]:
    """Seeds of up to so many rounds; no second one that would not end within `seconds`."""
    began = time.perf_counter()
    for done in range(rounds):
        if done and (time.perf_counter() - began) * (done + 1) / done > seconds:
            return
        yield done


# -- tokens, coloured by origin


def _stream(engine: Engine, params: SamplingParams, console: Console) -> None:
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


# -- figures


def record_of(runs: Mapping[str, Sequence[Run]], cores: Mapping[str, int]) -> dict[str, Any]:
    """Figures of each mode, and of all beside off, over the rounds that all of them have run. `cores` are those that
    the target could run on."""
    count = min(map(len, runs.values()))
    modes = {mode: runs[mode][:count] for mode in get_args(Mode)}
    figures = {mode: figures_of(own, cores[mode]) for mode, own in modes.items()}
    outputs = {mode: joined(own).outputs for mode, own in modes.items()}
    off, others = figures[OFF]["tokens_per_second"], [mode for mode in modes if mode != OFF]
    return {
        **figures,
        "speedup": {mode: figures[mode]["tokens_per_second"] / off for mode in others},
        "sequences": len(outputs[OFF]),
        "matched": {mode: sum(map(eq, outputs[OFF], outputs[mode])) for mode in others},
    }


def figures_of(runs: Sequence[Run], cores: int) -> dict[str, Any]:
    """Medians and counts over all runs. Depths count verify steps: whose tree reached depth 1, 2, …, and that accepted
    a token there. Time went to the draft, the target's forward, sampling and walking, all else."""
    own, speeds = joined(runs), rates(runs)
    shares = {part: own.spent(part) / own.seconds for part in ("draft", "forward", "verify")}
    return {
        "tokens_per_second": median(speeds),
        "tokens_per_second_rounds": speeds,
        "tokens_per_verify_step": own.tokens / own.total("verify_steps"),
        "target_cores": cores,
        "offered_by_depth": own.by_depth("offered_by_depth"),
        "accepted_by_depth": own.by_depth("accepted_by_depth"),
        "accepted_by_origin": own.accepted_by_origin,
        "time_share": {**shares, "other": max(0.0, 1.0 - sum(shares.values()))},
    }


def all_equal(record: Mapping[str, Any]) -> bool:
    """Whether every mode's outputs are those of off."""
    return all(count == record["sequences"] for count in record["matched"].values())


def _show(scene: Scene, record: Mapping[str, Any], pacing: Sequence[Pacer], console: Console) -> None:
    table = Table("", title=scene.title, title_justify="left", box=None, pad_edge=False)
    for mode in get_args(Mode):
        table.add_column(mode, justify="right")
    for number, (heading, cells) in enumerate(_rows([record[mode] for mode in get_args(Mode)])):
        table.add_row(heading, *cells, style=None if number else "bold")
    console.print(table)
    speeds = ", ".join(f"{mode} {speedup:.2f}" for mode, speedup in record["speedup"].items())
    total = record["sequences"] * len(record["matched"])
    equal = f"{sum(record['matched'].values())} of {total} outputs equal token for token ({scene.dtype})"
    style = "bold" if all_equal(record) else "bold yellow"
    console.print(Text(f"\ntimes off: {speeds}; {equal}", style=style))
    if pacing:
        console.print(paced(pacing))
    console.print()


def _rows(figures: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Iterable[str]]]:
    yield "tokens/s, median", [f"{one['tokens_per_second']:.1f}" for one in figures]
    rounds = [one["tokens_per_second_rounds"] for one in figures]
    yield "  slowest to fastest round", [f"{min(speeds):.1f} to {max(speeds):.1f}" for speeds in rounds]
    yield "tokens per verify step", [f"{one['tokens_per_verify_step']:.2f}" for one in figures]
    yield "cores of the target", [str(one["target_cores"]) for one in figures]
    for part in figures[0]["time_share"]:
        yield f"time: {part}", [f"{one['time_share'][part]:.0%}" for one in figures]
    for name in dict.fromkeys(name for one in figures for name in one["accepted_by_origin"]):
        cells = [str(one["accepted_by_origin"].get(name, 0)) if one["offered_by_depth"] else "" for one in figures]
        yield f"accepted, guessed by {name}", cells
    depths = zip_longest(*map(_accepted, figures), fillvalue="")
    for depth, shares in enumerate(islice(depths, DEPTHS_SHOWN), 1):
        yield f"accepted at depth {depth}", shares


def _accepted(figures: dict[str, Any]) -> list[str]:
    depths = zip(figures["accepted_by_depth"], figures["offered_by_depth"], strict=True)
    return [f"{accepted} of {offered} · {accepted / offered:4.0%}" for accepted, offered in depths]
