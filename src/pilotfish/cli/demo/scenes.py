import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, zip_longest
from operator import eq
from statistics import median
from typing import Any, get_args

from rich.console import Console
from rich.text import Text

from pilotfish.cli.bench.contestants import OFF, Run, joined, rates
from pilotfish.cli.demo.runs import Scene, Show, Timing, Work, slower_scene, time_modes
from pilotfish.cli.show import DRAFTED, OWN, OriginStream, paced, print_json, shows_colour, table_of, warn_of_overruns
from pilotfish.config.fields import Mode
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.model.pacer import Pacer

OPENING, CLOSING = "«", "»"  # around drafted tokens where there are no colours
MODES = get_args(Mode)
#: Times that a pace which was not held is stretched again.
RETRIES = 2
DEPTHS_SHOWN = 8


def run_demo(scenes: Sequence[Scene], work: Work, *, rounds: int, json: bool, began: float) -> bool:
    """False if float32 outputs of two modes differ. `began`: `time.perf_counter`."""
    console, records = Console(highlight=False), dict[str, dict[str, Any]]()
    for number, scene in enumerate(scenes):
        show = None if number or json else partial(stream, work=work, console=console)
        ran, record, pacing = _compare(scene, work, rounds, show, quiet=json)
        records[scene.name] = record
        if not json:
            _print(ran, record, pacing, console)
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
    """The scene as finally run. Async first, whose text is shown; then, on all cores, off and sync."""
    scene, own = _time_async(scene, work, rounds, show, quiet=quiet)
    others = time_modes(replace(scene.config, mode="sync"), own.work, rounds, quiet=quiet)
    pacing = [*own.pacing, *others.pacing]
    about = {
        "pair": scene.pair,
        "parameters": own.parameters,
        "dtype": own.dtype,
        "prompts": len(own.work.prompts),
        "max_tokens": own.work.params.max_tokens,
        "pace": scene.config.pace,
        "valid": all(pacer.valid for pacer in pacing),
    }
    return scene, {**about, **record_of(own.runs | others.runs, own.cores | others.cores)}, pacing


def _time_async(scene: Scene, work: Work, rounds: int, show: Show | None, *, quiet: bool) -> tuple[Scene, Timing]:
    timing = time_modes(scene.config, work, rounds, show=show, quiet=quiet)
    for _ in range(RETRIES):
        if timing.valid or scene.stretch is None:
            break
        scene = slower_scene(scene, timing.pacing)
        timing = time_modes(scene.config, work, rounds, quiet=quiet)
    return scene, timing


def stream(engine: Engine, work: Work, console: Console) -> None:
    coloured, prompt = shows_colour(console), work.prompts[0].text
    told = "guessed by the draft, accepted by the target"
    legend = Text(f"{OPENING}{told}{CLOSING}, the target's own\n")
    if coloured:
        legend = Text.assemble((told, DRAFTED), (" · ", "dim"), ("the target's own", OWN), (" · prompt\n", "dim"))
    console.print(legend)
    asked = work.first if prompt == work.first else f"{work.first}\n\n"
    console.print(Text(asked, style="dim"), end="", soft_wrap=True)
    for piece in _pieces(engine, prompt, work.params, coloured=coloured):
        console.print(piece, end="", soft_wrap=True)
    console.print("\n")


def _pieces(engine: Engine, prompt: str | Sequence[int], params: SamplingParams, *, coloured: bool) -> Iterator[Text]:
    origins = OriginStream()
    engine.submit(prompt, params)
    while engine.busy:
        for delta in engine.step():
            if coloured:
                yield origins.coloured(delta)
            else:
                drafted, own = origins.parts(delta)
                yield Text((f"{OPENING}{drafted}{CLOSING}" if drafted else "") + own)


def record_of(runs: Mapping[str, Sequence[Run]], cores: Mapping[str, int]) -> dict[str, Any]:
    """Over the rounds that all modes have run. `cores`: those that the target could run on."""
    count = min(map(len, runs.values()))
    modes = {mode: runs[mode][:count] for mode in MODES}
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
    """Depths count verify steps whose tree reached depth 1, 2, …, and those that accepted a token there."""
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
    return all(count == record["sequences"] for count in record["matched"].values())


def verdict(record: Mapping[str, Any]) -> str:
    if not record["valid"]:
        return "no verdict: the machine did not hold the pace, so this says nothing about such devices"
    ratio = record["async"]["tokens_per_second"] / record["sync"]["tokens_per_second"]
    if ratio >= 1:
        return f"async is ahead: {ratio:.2f} times as fast as sync"
    own, all_cores = (record[mode]["target_cores"] for mode in ("async", "sync"))
    why = f": it leaves its target {own} of the {all_cores} cores that sync's has" if own < all_cores else ""
    return f"async is behind: {ratio:.2f} times as fast as sync{why}"


def _print(scene: Scene, record: Mapping[str, Any], pacing: Sequence[Pacer], console: Console) -> None:
    rows = [
        {"": heading, **{mode: Text(cell, "" if number else "bold") for mode, cell in zip(MODES, cells, strict=True)}}
        for number, (heading, cells) in enumerate(_rows([record[mode] for mode in MODES]))
    ]
    speeds = ", ".join(f"{mode} {speedup:.2f}" for mode, speedup in record["speedup"].items())
    total = record["sequences"] * len(record["matched"])
    equal = f"{sum(record['matched'].values())} of {total} outputs equal token for token ({record['dtype']})"
    style = "bold" if all_equal(record) else "bold yellow"
    console.print(table_of(rows, title=scene.title))
    console.print(Text(f"\ntimes off: {speeds}; {equal}", style=style), soft_wrap=True)
    console.print(Text(verdict(record), style="bold"), soft_wrap=True)
    if pacing:
        console.print(paced(pacing), soft_wrap=True)
    console.print()


def _rows(figures: Sequence[dict[str, Any]]) -> Iterator[tuple[str, Sequence[str]]]:
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
    counts = [zip(one["accepted_by_depth"], one["offered_by_depth"], strict=True) for one in figures]
    depths = [[f"{accepted} of {offered} · {accepted / offered:4.0%}" for accepted, offered in own] for own in counts]
    for depth, shares in enumerate(islice(zip_longest(*depths, fillvalue=""), DEPTHS_SHOWN), 1):
        yield f"accepted at depth {depth}", shares
