"""When sessions begin: so many at a time, at a rate, in bursts, or as a trace says."""

import re
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
from msgspec import Struct

from pilotfish.cli.bench.serving.options import ServeBenchOptions
from pilotfish.cli.bench.serving.requests import RequestSession
from pilotfish.cli.bench.workload import parse_numbers
from pilotfish.errors import ParameterError

_RATE = re.compile(r"[0-9]+(\.[0-9]+)?", re.ASCII)


class ServedLoad(Struct, frozen=True):
    """A closed loop of so many sessions at a time; or an open one, in which each begins at its time."""

    concurrency: int | None = None
    rate: float | None = None  # sessions a second; None where a trace says when

    def named(self, times: Sequence[float]) -> dict[str, float]:
        """Its column in tables; of a trace the mean rate of its times."""
        if self.concurrency is not None:
            return {"concurrency": self.concurrency}
        return {"rate": self.rate or round(len(times) / max(times[-1], 1e-3), 3)}


def loads_of(options: ServeBenchOptions) -> list[ServedLoad]:
    """One after the other. ParameterError for what does not go together."""
    if options.concurrencies and options.rates:
        raise ParameterError("rate", options.rates, "either --concurrency or --rate")
    if (options.burst_on > 0) != (options.burst_off > 0):
        raise ParameterError("burst_off", options.burst_off, "--burst-on and --burst-off together")
    if options.rates:
        return [ServedLoad(rate=rate) for rate in _rates(options.rates)]
    if options.trace is not None and not options.concurrencies:
        return [ServedLoad()]
    return [ServedLoad(concurrency=n) for n in parse_numbers("concurrency", options.concurrencies or "1")]


def _rates(text: str) -> list[float]:
    rates = [float(part) if _RATE.fullmatch(part) else 0.0 for part in text.split(",")]
    if not all(0 < rate <= 1e6 for rate in rates):
        raise ParameterError("rate", text, "sessions a second, more than 0, separated by commas")
    return rates


def times_of(load: ServedLoad, sessions: Sequence[RequestSession], options: ServeBenchOptions) -> list[float]:
    """Seconds from the load's beginning at which each session is to begin; none of a closed loop."""
    if load.concurrency is not None:
        return []
    if load.rate is None:
        return [(session.at - sessions[0].at) / options.speedup for session in sessions]
    return list(islice(burst_times(load.rate, options), len(sessions)))


def burst_times(rate: float, options: ServeBenchOptions) -> Iterator[float]:
    """Without end: `rate` a second in the mean, pauses included."""
    on, off = options.burst_on, options.burst_off
    busy = on / (on + off) if on else 1.0
    for at in arrival_times(rate / busy, options.seed, options.burstiness):
        yield at + (at // on * off if on else 0.0)


def arrival_times(rate: float, seed: int, burstiness: float = 1.0) -> Iterator[float]:
    """Times of arrivals without end, `rate` a second in the mean. Intervals are gamma distributed with this shape: 1 is
    a Poisson process, less gives bursts, more evenness. One seed gives the same times, stretched, for all rates."""
    random, at = np.random.default_rng(seed), 0.0
    while True:
        at += float(random.standard_gamma(burstiness)) / (burstiness * rate)
        yield at
