"""`pilotfish chat`: a conversation in the terminal, or through pipes."""

from __future__ import annotations

from typing import Annotated

import typer

from pilotfish.cli.options import EngineOptions, SamplingOptions
from pilotfish.command import taking
from pilotfish.core.sampling_params import SamplingParams

ANSWER_TOKENS = 1024  # of an answer at most, where neither the user nor the model says


@taking(EngineOptions, SamplingOptions)
def chat(
    engine: EngineOptions,
    sampling: SamplingOptions,
    system: Annotated[str | None, typer.Option(help="A system message, before all turns.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template: the model continues the joined turns.")] = False,
) -> None:
    """Talk to a model. Each line is a turn; /help lists the commands. From a pipe: answers on stdout, nothing else."""
    given = sampling.given()
    SamplingParams(**{"max_tokens": ANSWER_TOKENS, **given})  # what cannot be is refused before a model is loaded
    config = engine.config(concurrency=1)
    from pilotfish.model.serving_imports import import_for_serving

    import_for_serving()
    from pilotfish.cli.chat_run import run_chat

    run_chat(config, {"max_tokens": ANSWER_TOKENS}, given, system=system, raw=raw)
