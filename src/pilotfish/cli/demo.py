"""`pilotfish demo`: speculation at work, and what it is worth, in under two minutes."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, cast

import typer

from pilotfish.cli.options import (
    DeviceOption,
    DTypeOption,
    EagerOption,
    JsonOption,
    MaxTokensOption,
    TemperatureOption,
    ThreadsOption,
    resolve_models,
)
from pilotfish.config import DType, EngineConfig
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.errors import ParameterError

PAIR = "pycode@344m"
#: A target and a draft that are quick enough to take the time of others.
PACED_PAIR = "pycode"
AUTO = "auto"
MAX_ROUNDS = 100


def demo(
    pair: Annotated[str, typer.Option(help="Of the second table, at its own speed: pycode, or pycode@<N>m.")] = PAIR,
    max_tokens: MaxTokensOption = 64,
    temperature: TemperatureOption = 0.8,
    rounds: Annotated[int, typer.Option(help="Timed rounds of each mode, at most.")] = 3,
    dtype: DTypeOption = EngineConfig.dtype,
    device: DeviceOption = EngineConfig.device,
    threads: ThreadsOption = EngineConfig.threads,
    pace: Annotated[
        str,
        typer.Option(help="Of the first table: the devices that pycode emulates; auto: what is held here."),
    ] = AUTO,
    eager: EagerOption = False,
    json: JsonOption = False,
) -> None:
    """Write code with a draft guessing ahead, coloured by who wrote each token; then time off, sync and async: at the
    pace of a 70B and a 1B model (slower, in the same proportion, where this machine would not keep up), and at this
    machine's own."""
    if not 1 <= rounds <= MAX_ROUNDS:
        raise ParameterError("rounds", rounds, f"an integer 1 to {MAX_ROUNDS}")
    if not pace:
        raise ParameterError("pace", pace, f"{AUTO}, or paces as in target=10.4ms,draft=2.6ms")
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0)

    def config(pair: str, pace: str) -> EngineConfig:
        models = resolve_models(pair, None, None)
        return EngineConfig(
            target=models.target,
            draft=models.draft,
            mode="async",
            dtype=cast(DType, dtype),
            device=device,
            threads=threads,
            pace=pace,
            eager=eager,
        )

    paced, unpaced = config(PACED_PAIR, "" if pace == AUTO else pace), config(pair, "")
    from pilotfish.model.serving_imports import import_for_serving

    import_for_serving()
    from pilotfish.cli.demo_run import Scene, held_pace, run_demo

    note = ""
    if pace == AUTO:
        held = held_pace(paced, params, quiet=json)
        paced, note = replace(paced, pace=held.text), held.note
    scenes = [
        Scene("paced", f"{PACED_PAIR} at the pace of other devices: {paced.pace}{note}", PACED_PAIR, paced),
        Scene("unpaced", f"{pair} at the speed of this machine", pair, unpaced),
    ]
    if not run_demo(scenes, params, rounds=rounds, json=json):
        raise typer.Exit(1)
