"""Options of `pilotfish plan hardware` and `whatif`: each replaces a field of a plan's file."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from pilotfish.command import Given
from pilotfish.errors import InputError, ParameterError
from pilotfish.options import Option

_DEVICE = re.compile(r"(?P<name>[^@]+?)(?:x(?P<count>[0-9]{1,4}))?(?:@(?P<low>[0-9.]+)(?:-(?P<high>[0-9.]+))?)?")
_FORMS = {
    "devices": "names, numbers and USD an hour, as in h200,l40sx2@0.8-1.6",
    "drafts": "models, maybe with the rate of a guess, as in qwen3-0.6b,qwen3-1.7b=0.7",
}


def devices_of(field: str, text: str) -> list[Given]:
    """`h200,l40sx2@0.8-1.6` as a plan's file has it."""
    return [_device(field, one) for one in text.split(",")]


def drafts_of(field: str, text: str) -> list[Given]:
    """`qwen3-0.6b,qwen3-1.7b=0.7` as a plan's file has it."""
    return [_draft(field, one) for one in text.split(",")]


SITUATION = [
    Option("target", str, None, "A model of docs/planning.md."),
    Option(
        "devices",
        str,
        None,
        f"{_FORMS['devices']}; without USD those of docs/planning.md.",
        extra={"parse": devices_of},
    ),
    Option("drafts", str, None, f"{_FORMS['drafts']}; without a rate the published one.", extra={"parse": drafts_of}),
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


def record_of(plan: Path | None, situation: Given, limits: Given) -> dict[str, Any]:
    """What a file says with what options replace. InputError names the file."""
    record = {**_read(plan), **situation}
    return {**record, "limits": {**_section(record, "limits"), **limits}}


def with_workload(record: dict[str, Any], given: Given) -> dict[str, Any]:
    """With a load that options replace in part. ParameterError where a prompt comes without an output."""
    lengths = {name: given[name] for name in ("prompt", "output") if name in given}
    if len(lengths) == 1:
        ((name, tokens),) = lengths.items()
        raise ParameterError(name, tokens, "both --prompt and --output")
    others = {name: value for name, value in given.items() if name not in lengths}
    workload = _section(record, "workload")
    if "rate" in others or "users" in others:  # one of them replaces the other
        workload = {name: value for name, value in workload.items() if name not in ("rate", "users")}
    return {**record, "workload": {**workload, **others, **({"requests": [lengths]} if lengths else {})}}


def _section(record: dict[str, Any], name: str) -> dict[str, Any]:
    section = record.get(name, {})
    if not isinstance(section, dict):
        raise ParameterError(name, section, "a table of the plan")
    return section


def _read(plan: Path | None) -> dict[str, Any]:
    if plan is None:
        return {}
    try:
        return tomllib.loads(plan.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"plan: {plan} cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"plan: {plan} is not TOML: {error}") from error


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
