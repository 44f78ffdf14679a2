import time
from dataclasses import replace
from typing import Annotated

import typer

from pilotfish.cli.options import JsonOption
from pilotfish.cli.show import status, warn_line
from pilotfish.command import Given, taking
from pilotfish.config.engine import EngineConfig
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine import pairs
from pilotfish.engine.pairs.directories import download
from pilotfish.errors import InputError, ParameterError
from pilotfish.options import pick

#: An assistant from the package index; where that cannot be reached, a model of code.
PAIR, OFFLINE = "smollm2", "pycode@344m"
AUTO = "auto"
MAX_ROUNDS = 100
SAMPLING = [
    replace(one, help="Of each output, at most: as many as there is time for.") if one.name == "max_tokens" else one
    for one in pick(SamplingParams, "max_tokens", "temperature", max_tokens=64, temperature=0.8)
]
ENGINE = ("dtype", "device", "threads", "eager")


@taking(SAMPLING, pick(EngineConfig, *ENGINE))
def demo(
    sampling: Given,
    engine: Given,
    pair: Annotated[
        str | None, typer.Option(help=f"smollm2, pycode, or pycode@<N>m.  [default: {PAIR}; offline {OFFLINE}]")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Timed rounds of each mode, at most.")] = 3,
    pace: Annotated[
        str, typer.Option(help="Of the first table: the devices that it emulates; auto: what is held here.")
    ] = AUTO,
    json: JsonOption = False,
) -> None:
    """Answer with a draft guessing ahead, coloured by who wrote each token; then time off, sync and async: at the pace
    of a 70B and a 1B model (slower, in the same proportion, where this machine would not keep up), and at this
    machine's own. The model is downloaded once, through pip."""
    began = time.perf_counter()
    if not 1 <= rounds <= MAX_ROUNDS:
        raise ParameterError("rounds", rounds, f"an integer 1 to {MAX_ROUNDS}")
    if not pace:
        raise ParameterError("pace", pace, f"{AUTO}, or paces as in target=10.4ms,draft=2.6ms")
    params = SamplingParams(**sampling, seed=0)  # checked before a model is loaded
    pair = pair or _downloaded(PAIR)
    paced_pair = pair.partition("@")[0]  # quick enough to take the time of others
    paced, unpaced = _config(paced_pair, "" if pace == AUTO else pace, engine), _config(pair, "", engine)
    from pilotfish.model.loading.serving_imports import import_for_serving

    import_for_serving()
    from pilotfish.cli.demo.runs import Scene, Work, measured_scene
    from pilotfish.cli.demo.scenes import run_demo
    from pilotfish.model.cpu.native import load_kernels

    work = Work.of(paced.target, params)
    if paced.device == "cpu" and not paced.eager:  # before a draft's process would build them as well
        with status("building the kernels, once on this machine", quiet=json):
            load_kernels()
    if pace == AUTO:
        with status("measuring what pace this machine holds", quiet=json):
            first = measured_scene(paced_pair, paced, work, quiet=True)
    else:
        first = Scene("paced", f"{paced_pair} at the pace of other devices: {pace}", paced_pair, paced)
    scenes = [first, Scene("unpaced", f"{pair} at the speed of this machine", pair, unpaced)]
    if not run_demo(scenes, work, rounds=rounds, json=json, began=began):
        raise typer.Exit(1)


def _downloaded(pair: str) -> str:
    try:
        download(pair)
    except InputError as error:
        warn_line(f"{error}; {OFFLINE} instead")
        return OFFLINE
    return pair


def _config(pair: str, pace: str, engine: Given) -> EngineConfig:
    models = pairs.resolve_pair(pair)
    return EngineConfig(target=models.target, draft=models.draft, mode="async", pace=pace, prefix_cache=False, **engine)
