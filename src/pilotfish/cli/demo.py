"""`pilotfish demo`: speculation at work, and what it is worth, in under two minutes."""

from __future__ import annotations

from typing import Annotated, cast

import typer

from pilotfish.cli.options import (
    DeviceOption,
    DTypeOption,
    EagerOption,
    JsonOption,
    MaxTokensOption,
    PaceOption,
    TemperatureOption,
    ThreadsOption,
    resolve_models,
)
from pilotfish.config import DType, EngineConfig
from pilotfish.core.sampling_params import SamplingParams
from pilotfish.errors import ParameterError

PAIR = "pycode@344m"
MAX_ROUNDS = 100


def demo(
    pair: Annotated[str, typer.Option(help="pycode, or pycode@<N>m.")] = PAIR,
    max_tokens: MaxTokensOption = 64,
    temperature: TemperatureOption = 0.8,
    rounds: Annotated[int, typer.Option(help="Timed rounds, off and sync in turn, at most.")] = 3,
    dtype: DTypeOption = EngineConfig.dtype,
    device: DeviceOption = EngineConfig.device,
    threads: ThreadsOption = EngineConfig.threads,
    pace: PaceOption = EngineConfig.pace,
    eager: EagerOption = False,
    json: JsonOption = False,
) -> None:
    """Write code with a draft guessing ahead, coloured by who wrote each token; then time off against sync."""
    if not 1 <= rounds <= MAX_ROUNDS:
        raise ParameterError("rounds", rounds, f"an integer 1 to {MAX_ROUNDS}")
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=0)
    models = resolve_models(pair, None, None)
    config = EngineConfig(
        target=models.target,
        draft=models.draft,
        mode="sync",
        dtype=cast(DType, dtype),
        device=device,
        threads=threads,
        pace=pace,
        eager=eager,
    )
    from pilotfish.cli.demo_run import run_demo

    if not run_demo(pair, config, params, rounds=rounds, json=json):
        raise typer.Exit(1)
