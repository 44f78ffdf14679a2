"""`pilotfish plan hardware` and `whatif`: what to buy for a load, and for that of a recorded trace."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from pilotfish.cli.options import JsonOption
from pilotfish.cli.plan.plan_options import LIMITS, SITUATION, WORKLOAD, record_of, with_workload
from pilotfish.cli.plan.plan_show import choice_record, print_choice, print_load
from pilotfish.cli.show import print_json, progress_bar
from pilotfish.command import Given, taking

_HELP = "A plan's TOML file (docs/hardware-plans.md); options replace what it says."


def _bar(total: int) -> AbstractContextManager[Callable[[], None]]:
    return progress_bar(Console(stderr=True), total, "deployments")


@taking(SITUATION, LIMITS, WORKLOAD)
def hardware(
    situation: Given,
    limits: Given,
    workload: Given,
    plan: Annotated[Path | None, typer.Argument(help=_HELP)] = None,
    json: JsonOption = False,
) -> None:
    """Say which devices to buy, and how many, for a model and a load."""
    from pilotfish.plan.planner.choice import choose
    from pilotfish.plan.planner.situation import situation_of

    record = with_workload(record_of(plan, situation, limits), workload)
    choice = choose(situation_of(record, str(plan or "options")), _bar)
    print_json(choice_record(choice)) if json else print_choice(choice)


@taking(SITUATION, LIMITS)
def whatif(
    situation: Given,
    limits: Given,
    trace: Annotated[Path, typer.Argument(help="Mooncake's format: JSON Lines, maybe .gz.")],
    plan: Annotated[Path | None, typer.Argument(help=_HELP)] = None,
    json: JsonOption = False,
) -> None:
    """Plan for the traffic of TRACE: for its mean, and for its busiest minute. A plan's own workload is not used."""
    from msgspec import to_builtins

    from pilotfish.plan.planner.choice import choose
    from pilotfish.plan.planner.recorded import recorded_load
    from pilotfish.plan.planner.situation import situation_of
    from pilotfish.plan.trace import TimedRequest, read_trace

    record = record_of(plan, situation, limits)
    load = recorded_load(read_trace(trace, TimedRequest))
    choices = {
        name: choose(situation_of({**record, "workload": to_builtins(load.demand(rate))}, str(plan or "options")), _bar)
        for name, rate in (("mean", load.mean), ("peak", load.peak))
    }
    if json:
        print_json({"trace": to_builtins(load), **{name: choice_record(one) for name, one in choices.items()}})
    else:
        print_load(load, choices)
