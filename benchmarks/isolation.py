"""Whether the time to a first token tells a tenant what another has asked. What he himself has asked it must tell."""

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from math import sqrt
from statistics import NormalDist

import numpy as np
from dialogues import Ask, TextSupply
from harness import PAIR, Options, run
from reuse import Answered, ask_engine

from pilotfish.cli.bench.contestants import take_turns
from pilotfish.cli.bench.report import ProgressBar, Report, Row, Spread
from pilotfish.engine.engine import Engine

TENANT, OTHER = "a", "b"
#: Who asked the same just before.
NOBODY, ANOTHER, HIMSELF = "nobody", "another tenant", "the same tenant"
#: How rarely noise alone may look like a difference before one is reported.
LEAST_CHANCE = 0.001


def run_isolation(options: Options, progress: ProgressBar) -> Report:
    """`repeats` requests of each kind, kinds in turn. Fails where another tenant's requests show, or one's own do
    not."""
    progress.total = 3 * (options.repeats + 1)
    with Engine(options.engine_config(prefix_cache=True)) as engine:
        texts = TextSupply(options.rows(), engine.tokenizer)
        ask = partial(_asked, engine, texts, options.shared)
        kinds = {kind: partial(ask, kind) for kind in (NOBODY, ANOTHER, HIMSELF)}
        answered = take_turns(kinds, range(options.repeats + 1), done=progress)
    return report_of(answered)


def _asked(engine: Engine, texts: TextSupply, tokens: int, kind: str, turn: int) -> Answered:
    """A tenant's request, just after another one, of the same prompt or of one that is new too."""
    ask = Ask(texts.take(tokens, f"{turn} {kind}\n"), timed=True)
    before = Ask(texts.take(tokens, f"{turn} before\n"), timed=False) if kind == NOBODY else ask
    ask_engine(engine, before, 1, TENANT if kind == HIMSELF else OTHER)
    return ask_engine(engine, ask, 1, TENANT)


def report_of(answered: Mapping[str, Sequence[Answered]]) -> Report:
    """Times by who asked the same before, compared with those where nobody did."""
    seconds = {kind: [one.seconds for one in own] for kind, own in answered.items()}
    rows, tells = list[Row](), dict[str, bool]()
    for kind, own in seconds.items():
        sooner = share_sooner(own, seconds[NOBODY])
        chance = chance_of(sooner, len(own), len(seconds[NOBODY]))
        tells[kind] = chance < LEAST_CHANCE
        row: Row = {"asked_before_by": kind, "requests": len(own), "first_token_ms": Spread.of([1000 * s for s in own])}
        row["cached_tokens"] = statistics.median(one.cached_tokens for one in answered[kind])
        rows.append(row if kind == NOBODY else {**row, "sooner_than_new": sooner, "chance": chance})
    found = {"isolated": not tells[ANOTHER], "reuse_shows": tells[HIMSELF]}
    return Report({"first_tokens": rows, **found}, failed=not all(found.values()))


def share_sooner(times: Sequence[float], others: Sequence[float]) -> float:
    """Of all pairs, those in which the first is less, and half of the equal ones: 0.5 where nothing tells."""
    ranked = np.sort(others)
    less = len(ranked) - np.searchsorted(ranked, times, side="right")
    equal = np.searchsorted(ranked, times, side="right") - np.searchsorted(ranked, times, side="left")
    return float(np.mean(less + equal / 2) / len(ranked))


def chance_of(sooner: float, number: int, others: int) -> float:
    """How often equal distributions differ by as much, either way: the rank test of Mann and Whitney, by its normal
    approximation."""
    deviation = sqrt((number + others + 1) / (12 * number * others))
    return 2 * NormalDist().cdf(-abs(sooner - 0.5) / deviation)


if __name__ == "__main__":
    run(run_isolation, *PAIR, mode="off", threads=2, kv_slots=8192, shared=512, repeats=200)
