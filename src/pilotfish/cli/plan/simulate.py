from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer
from msgspec import to_builtins
from rich.console import Console

from pilotfish.cli.options import JsonOption
from pilotfish.cli.show import FILE_WIDTH, print_json, print_line, print_table, progress_bar, table_of
from pilotfish.config.fields import Mode
from pilotfish.errors import ParameterError
from pilotfish.plan.simulation.acceptance import trace_of
from pilotfish.plan.simulation.calibration import host_of
from pilotfish.plan.simulation.models import cost_of
from pilotfish.plan.simulation.setup import Setup, Speculation
from pilotfish.plan.simulation.sweep import Sweep, SweepPoint, crossover

T = TypeVar("T", int, float)
#: By setting: its points; the load at which it stops paying, of those that speculate.
Points = dict[str, list[SweepPoint]]
Stops = dict[str, float | None]
MODES: tuple[Mode, ...] = get_args(Mode)
MOST = 1 << 20
MANY = 1 << 16


def simulate(
    target: Annotated[str, typer.Option(help="model@device, maybe with x and how many, or times by rows: 10.4ms.")],
    draft: Annotated[str | None, typer.Option(help="The same of the draft; not needed with --mode off.")] = None,
    trace: Annotated[str, typer.Option(help="A file of `bench record`, or pycode: the bundled pair's.")] = "pycode",
    acceptance: Annotated[
        float | None, typer.Option(help="Draw a trace instead, in which a guess is right with this chance.")
    ] = None,
    mode: Annotated[str, typer.Option(help="Separated by commas; off is always run.")] = "sync,async",
    concurrency: Annotated[str, typer.Option(help="Requests at a time, in all, separated by commas.")] = "1,4,16,64",
    rate: Annotated[
        str | None, typer.Option(help="Requests a second instead, whatever has ended, separated by commas.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, max=MOST, help="Of each run.  [default: 4 for each at a time, at least 32]")
    ] = None,
    output_tokens: Annotated[int, typer.Option(min=1, max=MOST, help="Of each request.")] = 128,
    targets: Annotated[int, typer.Option(min=1, max=MANY)] = 1,
    pools: Annotated[int, typer.Option(min=1, max=MANY, help="Draft pools that they share, in mode async.")] = 1,
    delay_ms: Annotated[
        float, typer.Option(min=0, max=1e5, help="To the draft, one way; 0: no network between them.")
    ] = 0.0,
    nodes: Annotated[int, typer.Option(min=1, max=MANY, help="Of a tree that are verified, at most.")] = 16,
    levels: Annotated[int, typer.Option(min=1, max=MANY, help="sync: forwards of the draft for a tree, at most.")] = 4,
    width: Annotated[int, typer.Option(min=1, max=MANY, help="sync: leaves that a level expands.")] = 4,
    leaves: Annotated[int, typer.Option(min=1, max=MANY, help="async: leaves that a level expands, in all.")] = 32,
    fixed: Annotated[bool, typer.Option("--fixed", help="Fixed trees only, without the rule.")] = False,
    machine: Annotated[
        Path | None, typer.Option(help="A file of `plan calibrate`: what the host takes beside forwards.")
    ] = None,
    json: JsonOption = False,
) -> None:
    """Simulate speculation over an acceptance trace, by mode and load, beside no speculation."""
    speculation = Speculation(nodes=nodes, levels=levels, width=width, leaves=leaves, adaptive=not fixed)
    setup = Setup(
        target=cost_of("target", target),
        draft=None if draft is None else cost_of("draft", draft),
        speculation=speculation,
        host=host_of(machine),
        targets=targets,
        pools=pools,
        delay=delay_ms / 1e3,
    )
    loads = _numbers("concurrency", concurrency, int) if rate is None else _numbers("rate", rate, float)
    sweep = Sweep(
        setup=setup,
        trace=trace_of(trace, acceptance),
        modes=_modes(mode, draft),
        loads=loads,
        poisson=rate is not None,
        requests=requests,
        output=output_tokens,
    )
    with progress_bar(Console(stderr=True), sweep.runs, "runs") as advance:
        points = list(sweep.points(advance))
    by_setting: Points = {}
    for point in points:
        by_setting.setdefault(point.setting, []).append(point)
    stops = {setting: crossover(of) for setting, of in by_setting.items() if of[0].mode != "off"}
    if json:
        print_json(_record(sweep, by_setting, stops, target, draft))
    else:
        _print(sweep, by_setting, stops)


def _modes(text: str, draft: str | None) -> list[Mode]:
    modes = text.split(",")
    if unknown := [one for one in modes if one not in MODES]:
        raise ParameterError("mode", unknown[0], f"{', '.join(MODES)} or several, separated by commas")
    used: list[Mode] = [one for one in MODES if one in modes and one != "off"]
    if used and draft is None:
        raise ParameterError("draft", None, f"one, in mode {used[0]}")
    return used


def _numbers(field: str, text: str, kind: type[T]) -> list[T]:
    try:
        numbers = sorted({kind(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number <= MOST for number in numbers):
        raise ParameterError(field, text, f"numbers above 0 and up to {MOST}, separated by commas")
    return numbers


def _record(sweep: Sweep, by_setting: Points, stops: Stops, target: str, draft: str | None) -> Any:
    about = {"target": target, "draft": draft, "pair": sweep.trace.pair, "acceptance": sweep.trace.acceptance}
    setup = {name: getattr(sweep.setup, name) for name in ("speculation", "host", "targets", "pools", "delay")}
    load = {"load": "rate" if sweep.poisson else "concurrency", "requests": sweep.requests, "output": sweep.output}
    crossovers = [
        {"mode": by_setting[one][0].mode, "budget": by_setting[one][0].budget, "load": at} for one, at in stops.items()
    ]
    points = [point for of in by_setting.values() for point in of]
    return to_builtins({**about, **setup, **load, "points": points, "crossovers": crossovers})


def _print(sweep: Sweep, by_setting: Points, stops: Stops) -> None:
    pair, host = sweep.trace.pair, sweep.setup.host
    print_line(
        f"acceptance of {pair.target} with {pair.draft}: first guess right {sweep.trace.acceptance:.3f}, "
        f"temperature {pair.temperature:g}; {sweep.output} tokens a request; host {1e3 * host.step:g} ms a step, "
        f"{1e3 * host.level:g} ms a level"
    )
    rows = [{"\nmode": point.setting, **_cells(point, sweep.poisson)} for of in by_setting.values() for point in of]
    print_table(table_of(rows), in_file=FILE_WIDTH)
    for setting, at in stops.items():
        most = by_setting[setting][-1].load
        pays = f"pays up to {most:g} and maybe beyond" if at is None else f"stops paying at {at:.3g}"
        print_line(f"{setting}: {pays}")


def _cells(point: SweepPoint, poisson: bool) -> dict[str, str]:
    return {
        "requests\na second" if poisson else "at a\ntime": f"{point.load:g}",
        "\ntok/s": f"{point.tokens_per_second:.0f}",
        "of a\nuser": f"{point.user_tokens_per_second:.1f}",
        "of a\nstep": f"{point.tokens_per_step:.2f}",
        "TTFT\np50 ms": f"{1e3 * point.ttft_p50:.0f}",
        "\np99 ms": f"{1e3 * point.ttft_p99:.0f}",
        "TPOT\np50 ms": f"{1e3 * point.tpot_p50:.1f}",
        "speed-\nup": f"{point.speedup:.2f}",
        "draft\nbusy": "" if point.draft_busy is None else f"{point.draft_busy:.0%}",
        "over the\nbetter": "" if point.over_better is None else f"{point.over_better:.3f}",
    }
