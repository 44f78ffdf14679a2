import time
from dataclasses import replace
from typing import Annotated

import typer

from pilotfish.cli.options import JsonOption
from pilotfish.cli.show import status
from pilotfish.command import Given, taking
from pilotfish.config.engine import EngineConfig
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine import pairs
from pilotfish.errors import ParameterError
from pilotfish.options import pick

PAIR = "pycode@344m"
#: A target and a draft that are quick enough to take the time of others.
PACED_PAIR = "pycode"
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
    pair: Annotated[str, typer.Option(help="Of the second table, at its own speed: pycode, or pycode@<N>m.")] = PAIR,
    rounds: Annotated[int, typer.Option(help="Timed rounds of each mode, at most.")] = 3,
    pace: Annotated[
        str, typer.Option(help="Of the first table: the devices that pycode emulates; auto: what is held here.")
    ] = AUTO,
    json: JsonOption = False,
) -> None:
    """Write code with a draft guessing ahead, coloured by who wrote each token; then time off, sync and async: at the
    pace of a 70B and a 1B model (slower, in the same proportion, where this machine would not keep up), and at this
    machine's own."""
    began = time.perf_counter()
    if not 1 <= rounds <= MAX_ROUNDS:
        raise ParameterError("rounds", rounds, f"an integer 1 to {MAX_ROUNDS}")
    if not pace:
        raise ParameterError("pace", pace, f"{AUTO}, or paces as in target=10.4ms,draft=2.6ms")
    params = SamplingParams(**sampling, seed=0)  # checked before a model is loaded
    paced, unpaced = _config(PACED_PAIR, "" if pace == AUTO else pace, engine), _config(pair, "", engine)
    from pilotfish.model.loading.serving_imports import import_for_serving

    import_for_serving()
    from pilotfish.cli.demo.runs import Scene, Work, measured_scene
    from pilotfish.cli.demo.scenes import run_demo
    from pilotfish.model.cpu.native import load_kernels

    work = Work(params)
    if paced.device == "cpu" and not paced.eager:  # before a draft's process would build them as well
        with status("building the kernels, once on this machine", quiet=json):
            load_kernels()
    if pace == AUTO:
        with status("measuring what pace this machine holds", quiet=json):
            first = measured_scene(PACED_PAIR, paced, work, quiet=True)
    else:
        first = Scene("paced", f"{PACED_PAIR} at the pace of other devices: {pace}", PACED_PAIR, paced)
    scenes = [first, Scene("unpaced", f"{pair} at the speed of this machine", pair, unpaced)]
    if not run_demo(scenes, work, rounds=rounds, json=json, began=began):
        raise typer.Exit(1)


def _config(pair: str, pace: str, engine: Given) -> EngineConfig:
    models = pairs.resolve_pair(pair)
    return EngineConfig(target=models.target, draft=models.draft, mode="async", pace=pace, prefix_cache=False, **engine)
