import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import to_builtins
from rich.console import Console

from pilotfish.cli.options import JsonOption
from pilotfish.cli.plan.hardware_report import choice_record, print_choice, print_load
from pilotfish.cli.reading import read_toml
from pilotfish.cli.show import print_json, progress_bar
from pilotfish.command import Given, taking
from pilotfish.errors import ParameterError
from pilotfish.options import Option
from pilotfish.plan.planner.choice import HardwareChoice, choose
from pilotfish.plan.planner.situation import situation_of
from pilotfish.plan.trace import read_trace, recorded_load

_DEVICE = re.compile(r"(?P<name>[^@]+?)(?:x(?P<count>[0-9]{1,4}))?(?:@(?P<low>[0-9.]+)(?:-(?P<high>[0-9.]+))?)?")
_FORMS = {
    "devices": "names, numbers and USD an hour, as in h200,l40sx2@0.8-1.6",
    "drafts": "models, maybe with the rate of a guess, as in qwen3-0.6b,qwen3-1.7b=0.7",
}


def _listed(name: str, parse: Callable[[str, str], Given], otherwise: str) -> Option:
    each = {"parse": lambda field, text: [parse(field, one) for one in text.split(",")]}
    return Option(name, str, None, f"{_FORMS[name]}; {otherwise}.", extra=each)


def _device(field: str, text: str) -> Given:
    match = _DEVICE.fullmatch(text)
    if match is None:
        raise ParameterError(field, text, _FORMS[field])
    offer: Given = {"name": match["name"], "count": int(match["count"] or 1)}
    prices = [_number(field, text, price) for price in (match["low"], match["high"] or match["low"]) if price]
    return {**offer, "price": prices} if prices else offer


def _draft(field: str, text: str) -> Given:
    model, equals, rate = text.partition("=")
    given = {"rate": _number(field, text, rate), "source": "given as an option"} if equals else {}
    return {"model": model, **given}


def _number(field: str, text: str, number: str) -> float:
    try:
        return float(number)
    except ValueError:
        raise ParameterError(field, text, _FORMS[field]) from None


#: Options that replace fields of a plan's file.
SITUATION = [
    Option("target", str, None, "A model of docs/planning.md."),
    _listed("devices", _device, "without USD those of docs/planning.md"),
    _listed("drafts", _draft, "without a rate the published one"),
    Option("weights", str, None, "bf16, fp8 or int4."),
    Option("kv", str, None, "bf16 or fp8."),
    Option("engine", str, None, "Whose constants, as docs/planning.md has them."),
    Option("link", str, None, "Between devices that share no model."),
    Option("objective", str, None, "cost: least money a token; speed: most tokens a second of a user."),
]
LIMITS = [
    Option("tpot", float, None, "At most so many seconds between a user's tokens, in the mean."),
    Option("ttft", float, None, "At most so many seconds to the first token, in the mean."),
    Option("dollars_per_hour", float, None, "At most so much, at the mean of prices."),
]
WORKLOAD = [
    Option("prompt", int, None, "Tokens of a prompt; with --output."),
    Option("output", int, None, "Tokens of an output; with --prompt."),
    Option("shared", float, None, "Of prompts, the share that the prefix cache has."),
    Option("rate", float, None, "Requests a second; or --users."),
    Option("users", int, None, "Users who each have a request at all times."),
]
PlanArgument = Annotated[
    Path | None, typer.Argument(help="A plan's TOML file (docs/hardware-plans.md); options replace what it says.")
]


@taking(SITUATION, LIMITS, WORKLOAD)
def hardware(
    situation: Given, limits: Given, workload: Given, plan: PlanArgument = None, json: JsonOption = False
) -> None:
    """Say which devices to buy, and how many, for a model and a load."""
    choice = _choose(_with_workload(_record(plan, situation, limits), workload), plan)
    print_json(choice_record(choice)) if json else print_choice(choice)


@taking(SITUATION, LIMITS)
def whatif(
    situation: Given,
    limits: Given,
    trace: Annotated[Path, typer.Argument(help="Mooncake's format: JSON Lines, maybe .gz.")],
    plan: PlanArgument = None,
    json: JsonOption = False,
) -> None:
    """Plan for the traffic of TRACE: for its mean, and for its busiest minute. A plan's own workload is not used."""
    record = _record(plan, situation, limits)
    load = recorded_load(read_trace(trace))
    choices = {
        name: _choose({**record, "workload": to_builtins(load.demand(rate))}, plan)
        for name, rate in (("mean", load.mean), ("peak", load.peak))
    }
    if json:
        print_json({"trace": to_builtins(load), **{name: choice_record(one) for name, one in choices.items()}})
    else:
        print_load(load, choices)


def _choose(record: Given, plan: Path | None) -> HardwareChoice:
    bar = partial(progress_bar, Console(stderr=True), what="deployments")
    return choose(situation_of(record, str(plan or "options")), bar)


def _record(plan: Path | None, situation: Given, limits: Given) -> Given:
    record = {**({} if plan is None else read_toml("plan", plan)), **situation}
    return {**record, "limits": {**_section(record, "limits"), **limits}}


def _with_workload(record: Given, given: Given) -> Given:
    lengths = {name: given[name] for name in ("prompt", "output") if name in given}
    if len(lengths) == 1:
        ((name, tokens),) = lengths.items()
        raise ParameterError(name, tokens, "both --prompt and --output")
    others = {name: value for name, value in given.items() if name not in lengths}
    workload = _section(record, "workload")
    if "rate" in others or "users" in others:  # one of them replaces the other
        workload = {name: value for name, value in workload.items() if name not in ("rate", "users")}
    return {**record, "workload": {**workload, **others, **({"requests": [lengths]} if lengths else {})}}


def _section(record: Given, name: str) -> Given:
    section: Any = record.get(name, {})
    if not isinstance(section, dict):
        raise ParameterError(name, section, "a table of the plan")
    return section
