"""Figures of a load: latencies, throughput, goodput. Failed requests are counted, and in nothing else."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pilotfish.cli.bench.serving.options import ServeBenchOptions
from pilotfish.cli.bench.serving.records import SentRequest

PERCENTILES = (50, 90, 95, 99)


def latency_rows(records: Sequence[SentRequest]) -> list[dict[str, Any]]:
    """Milliseconds; percentiles as numpy's, by linear interpolation. ITL is of gaps, the others of requests."""
    whole = [one for one in records if not one.error]
    values: dict[str, Iterable[float | None]] = {
        "TTFT": (one.ttft for one in whole),
        "TPOT": (one.tpot for one in whole),
        "ITL": (gap for one in whole for gap in one.gaps),
        "E2E": (one.e2e for one in whole),
    }
    return [{"ms": name, **spread_of(found)} for name, found in values.items()]


def spread_of(seconds: Iterable[float | None]) -> dict[str, float | int]:
    """In milliseconds; only the count where there are none."""
    known = 1000 * np.array([one for one in seconds if one is not None])
    if not len(known):
        return {"count": 0}
    ranks = {f"p{share}": float(np.percentile(known, share)) for share in PERCENTILES}
    return {"count": len(known), "mean": float(known.mean()), **ranks, "max": float(known.max())}


def throughput_row(records: Sequence[SentRequest], options: ServeBenchOptions) -> dict[str, Any]:
    """Over the time from the first request's sending to the last answer's end."""
    whole = [one for one in records if not one.error]
    counts = {"requests": len(whole), "failed": len(records) - len(whole)}
    if not whole:
        return counts
    seconds = max(one.ended for one in whole) - min(one.sent for one in whole)
    tokens = sum(one.tokens for one in whole)
    prompts = [one.prompt_tokens for one in whole if one.prompt_tokens is not None]
    speeds = [1 / one.tpot for one in whole if one.tpot]
    return {
        **counts,
        "seconds": seconds,
        "requests_per_second": len(whole) / seconds,
        "tokens": tokens,
        "prompt_tokens": sum(prompts) if len(prompts) == len(whole) else None,
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_per_user": float(np.median(speeds)) if speeds else None,
        "tokens_per_second_per_device": tokens / seconds / options.devices,
        "at_a_time": sum(one.e2e for one in whole) / seconds,
        "late_ms": 1000 * max(max(0.0, one.sent - one.due) for one in whole),
        **goodput(records, options, seconds),
    }


#: What options `…_limit_ms` set limits on, as a request has it.
LIMITED = ("ttft", "tpot", "e2e")


def goodput(records: Sequence[SentRequest], options: ServeBenchOptions, seconds: float) -> dict[str, float]:
    """Share of all requests, failed ones among them, that keep every limit, and how many do a second. Nothing without
    a limit. Of an answer without a second token no TPOT can be too high; one without a first has none in time."""
    limits = {name: limit for name in LIMITED if (limit := getattr(options, f"{name}_limit_ms")) is not None}
    if not limits:
        return {}
    good = sum(_keeps(one, limits) for one in records)
    return {"goodput_share": good / len(records), "goodput_requests_per_second": good / seconds}


def _keeps(one: SentRequest, limits: Mapping[str, float]) -> bool:
    values = {name: getattr(one, name) for name in limits}
    if one.error or ("ttft" in values and one.ttft is None):
        return False
    return all(value is None or 1000 * value <= limits[name] for name, value in values.items())
