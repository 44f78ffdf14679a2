"""Tokens per second through servers that run already, over those through the first of them: what a way to a target
costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from pilotfish.bench.contestants import rates, take_turns
from pilotfish.bench.http import Served, fetch_from, read_all, served
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.report import ProgressBar, Report, Row, Spread, equal_share, percentile, ratios
from pilotfish.bench.workload import Job, parse_numbers
from pilotfish.errors import ParameterError

#: Share of the first server's tokens/s that the others keep.
PROMISE = 0.96


def run_servers(options: BenchOptions, progress: ProgressBar) -> Report:
    """They take turns: a warm-up, and `repeats` rounds."""
    urls = options.urls.split(",")
    if len(urls) < 2 or len(set(urls)) < len(urls) or not all(url.startswith("http://") for url in urls):
        raise ParameterError("urls", options.urls, "two or more http:// URLs, separated by commas")
    concurrencies = parse_numbers("concurrency", options.concurrencies)
    progress.total = len(urls) * len(concurrencies) * (options.repeats + 1)
    rows = [row for number in concurrencies for row in _rows(urls, number, options, progress)]
    holds = all(row["ratio"].median >= PROMISE for row in rows)
    return Report({"servers": rows, "promise": PROMISE, "holds": holds})


def _rows(urls: Sequence[str], number: int, options: BenchOptions, progress: ProgressBar) -> list[Row]:
    work = options.rounds(options.batches * number)
    contestants = {url: partial(_round, url, number) for url in urls}
    rounds = take_turns(contestants, work, done=lambda url: progress(f"{url}, {number} at a time"))
    return [_row(url, number, rounds[url], rounds[urls[0]]) for url in urls]


@dataclass(frozen=True)
class ServerRound:
    served: Served
    waits: list[float]  # milliseconds of each request until its first event

    @property
    def tokens_per_second(self) -> float:
        return self.served.tokens_per_second


def _round(url: str, number: int, jobs: Sequence[Job]) -> ServerRound:
    answers = read_all(fetch_from(url, number, jobs))
    return ServerRound(served(answers, {}), [1000 * (answer.events[0].at - answer.sent) for answer in answers])


def _row(url: str, number: int, runs: Sequence[ServerRound], others: Sequence[ServerRound]) -> Row:
    """`others` are of the same rounds, through the first server."""
    waits = [wait for run in runs for wait in run.waits]
    texts, other_texts = ([text for run in each for text in run.served.texts] for each in (runs, others))
    return {
        "url": url,
        "concurrency": number,
        "tokens_per_second": Spread.of(rates(runs)),
        "ratio": ratios(rates(runs), rates(others)),
        "first_token_ms_p50": percentile(waits, 0.5),
        "first_token_ms_p95": percentile(waits, 0.95),
        "equal_outputs": equal_share(texts, other_texts),
    }
