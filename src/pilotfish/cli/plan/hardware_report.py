from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import to_builtins

from pilotfish.cli.show import print_line, print_table, table_of
from pilotfish.plan.planner.choice import Crossover, HardwareChoice, shortfall
from pilotfish.plan.planner.demand import Demand
from pilotfish.plan.planner.outlook import Money, Outlook
from pilotfish.plan.trace import RecordedLoad

#: Characters of a table, however narrow the terminal.
TABLE_WIDTH = 250


def choice_record(choice: HardwareChoice) -> dict[str, Any]:
    record: dict[str, Any] = to_builtins(choice)
    for inner, one in zip((record["chosen"], *record["kinds"]), (choice.chosen, *choice.kinds), strict=True):
        inner.update(_computed(one))
    return {**record, "shortfall": shortfall(choice), "headroom": choice.chosen.headroom(choice.situation.workload)}


def _computed(one: Outlook) -> dict[str, Any]:
    deployment = one.deployment
    return {
        "kind": deployment.kind,
        "devices": dict(deployment.devices),
        "usd_per_million": to_builtins(one.token_cost),
        "tpot": one.point.tpot,
        "binds": one.point.binds,
        "kv_tokens": deployment.kv_tokens,
        "kv_tokens_taken": deployment.tokens_taken,
    }


def print_choice(choice: HardwareChoice) -> None:
    if choice.situation.about:
        print_line(choice.situation.about)
    rows = [_cells(one) for one in choice.kinds]
    print_table(table_of(rows, left=rows[0] if rows else ()), at_least=TABLE_WIDTH)
    crossovers = [*map(_crossover, choice.crossovers)] or ["Speculation: no draft was given, or none fits."]
    print_line("", *_verdict(choice), *_bounds(choice.chosen), *crossovers, *_acceptance(choice), *_caveats(choice))


def print_load(load: RecordedLoad, choices: Mapping[str, HardwareChoice]) -> None:
    facts = f"{load.requests} requests in {load.minutes:.0f} minutes: {load.mean:.2f} a second, {load.peak:.2f} in the"
    print_line(f"{facts} busiest minute; {load.shared:.0%} of prompts' tokens came before")
    for name, choice in choices.items():
        print_line("", f"{name}:")
        print_choice(choice)


def _cells(one: Outlook) -> dict[str, str]:
    deployment, point = one.deployment, one.point
    tree = "" if point.step.tree is None else f", {point.step.tree.nodes} guesses"
    return {
        "kind": deployment.kind,
        "draft": "" if deployment.draft is None else f"{deployment.draft.name}{tree}",
        "devices": ", ".join(f"{count} {name}" for name, count in deployment.devices.items()),
        "targets": f"{deployment.replicas} x {sum(count for _, count in deployment.target.devices)}",
        "tokens/s a user": f"{point.speed:.1f}",
        "tokens/s": f"{point.tokens:.0f}{'' if one.serves else ' (short)'}",
        "TTFT ms": f"{1e3 * point.ttft:.0f}",
        "TPOT ms": f"{1e3 * point.tpot:.1f}",
        "at once": f"{point.sequences * deployment.replicas}",
        "USD/h": _range(one.hourly),
        "USD/Mtok": _range(one.token_cost),
        "MJ/Mtok": "" if one.joules is None else f"{one.joules / 1e6:.2f}",
        "most req/s": f"{one.capacity.requests:.2f}",
        "stopped by": one.stops,
        "most time": f"{point.binds} {point.shares[point.binds]:.0%}",
    }


def _verdict(choice: HardwareChoice) -> Iterator[str]:
    one, demand = choice.chosen, choice.situation.workload
    what = ", ".join(f"{count} x {name}" for name, count in one.deployment.devices.items())
    asked = f"{demand.users} users" if demand.users is not None else f"{demand.rate:.3g} requests/s"
    if one.serves:
        yield f"Buy {what}: {one.deployment.kind}. It serves {asked}; best of {choice.tried} deployments."
    else:
        yield f"Nothing serves {asked} within the limits."
        yield f"The most is {what}: {one.deployment.kind}, {shortfall(choice):.0%} short."
    yield from _uncertainty(one, demand)


def _uncertainty(one: Outlook, demand: Demand) -> Iterator[str]:
    low, high, point = one.band.low, one.band.high, one.point
    yield (
        f"Uncertainty: on {one.band.rows} published rows the true rate was {low:.2f} to {high:.2f} of the model's"
        f" (10 % to 90 %): {point.speed * low:.0f} to {point.speed * high:.0f} tokens/s a user,"
        f" at most {one.capacity.requests * low:.2f} to {one.capacity.requests * high:.2f} requests/s."
    )
    if (headroom := one.headroom(demand)) is not None and one.serves:
        advice = "" if headroom >= 1 else ": try it first, or buy more"
        yield f"At the low end it still serves {headroom:.2f} times the demand{advice}."
    if one.token_cost is not None:
        best, worst = (1.0, 1.0) if demand.rate is not None else (high, low)  # a demand's rate is what it is
        cost = f"{one.token_cost.low / best:.2f} to {one.token_cost.high / worst:.2f}"
        yield f"Cost: {cost} USD per million output tokens, prompts included, by prices and rates together."
    else:
        yield "Cost: not known, since a device has no price; devices are counted instead."


def _bounds(one: Outlook) -> Iterator[str]:
    shares = sorted(one.point.shares.items(), key=lambda pair: -pair[1])
    yield f"A target's time goes to {', '.join(f'{name} {share:.0%}' for name, share in shares if share >= 0.005)}."
    deployment = one.deployment
    yield (
        f"More than {one.capacity.sequences} at once in a target is stopped by: {one.stops}."
        f" KV has room for {deployment.kv_tokens:,.0f} tokens in each."
    )
    if deployment.tokens_taken:
        sequences = deployment.tokens_taken / (deployment.tokens_taken + deployment.kv_tokens)
        taken = f"{deployment.tokens_taken:,.0f} tokens of KV, {sequences:.0%} of the sequences"
        yield f"The co-resident draft takes room from each target: {taken}."


def _crossover(crossover: Crossover) -> str:
    one = crossover.outlook
    device, count = one.deployment.target.devices[0]
    name = f"{one.deployment.kind}, {one.deployment.replicas} x {count} {device.full_name}"
    if not crossover.ranges:
        return f"Speculation ({name}) pays at no load that fits."
    spans = ", ".join(f"{span.first} to {span.last}" for span in crossover.ranges)
    gain = f"{crossover.ranges[0].gain:.2f} times as fast as plain steps at {crossover.ranges[0].first}"
    end = crossover.ranges[-1].last
    up_to = "all that fit" if end == crossover.room else f"up to {crossover.requests:.2f} requests/s"
    return f"Speculation ({name}) pays with {spans} sequences in a target, {up_to}, {gain}."


def _acceptance(choice: HardwareChoice) -> Iterator[str]:
    one = choice.speculative
    if one is None or one.deployment.draft is None:
        return
    given = one.deployment.draft.acceptance
    yield f"Acceptance of {one.deployment.draft.name} ({given.basis}): {given.why}."
    for row in choice.sensitivity:
        cost = "" if row.token_cost is None else f", {row.token_cost:.2f} USD/Mtok"
        short = "" if row.serves else ", short of the demand"
        speeds = f"{row.speed:.1f} tokens/s a user, {row.tokens:.0f} in all"
        yield f"  {row.name}, {row.acceptance:.2f}: {speeds}{cost}{short}"
    even = "no acceptance" if choice.break_even is None else f"{choice.break_even:.2f}"
    yield f"  Guesses break even with plain steps at {even} ({one.point.sequences} in a target)."


def _caveats(choice: HardwareChoice) -> Iterator[str]:
    situation = choice.situation
    constants = situation.constants
    assumed = [name for name in constants.__struct_fields__ if getattr(constants, name).basis == "assumed"]
    if assumed:
        yield f"Assumed, not measured: {', '.join(assumed)} of {situation.engine}."
    for offer in situation.devices:
        device = offer.device()
        doubtful = [name for name in device.unverified if name != "price" or offer.price is None]
        given = "its price is given by the plan; " if offer.price is not None else ""
        if given or doubtful:
            yield f"{device.full_name}: {given}without a source: {', '.join(doubtful) or 'nothing'}."
    if choice.chosen.deployment.mode == "async":
        yield "The band of async is of two engines, whose rows were nearly all predicted too fast: it is too narrow."
    yield "Joules are of the devices at designed power while at work: an upper bound, without hosts and cooling."
    yield "Not validated by any published row: queues, prefill, networks, mixtures of experts, long contexts."


def _range(money: Money | None) -> str:
    return "" if money is None else f"{money.low:.2f}-{money.high:.2f}"
