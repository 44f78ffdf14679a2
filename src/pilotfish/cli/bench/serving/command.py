"""`pilotfish bench serve`: warms the server up, offers one load after the other, and reports."""

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

import uvloop
from msgspec import Struct, to_builtins

from pilotfish.cli.bench.report import ProgressBar, Report, Row
from pilotfish.cli.bench.serving.acceptance import counted, total_accepted
from pilotfish.cli.bench.serving.endpoint import ServedEndpoint, find_endpoint
from pilotfish.cli.bench.serving.figures import latency_rows, throughput_row
from pilotfish.cli.bench.serving.loads import ServedLoad, loads_of, times_of
from pilotfish.cli.bench.serving.options import ServeBenchOptions
from pilotfish.cli.bench.serving.records import EVENTS, SentRequest, record_of
from pilotfish.cli.bench.serving.requests import RequestSession
from pilotfish.cli.bench.serving.sending import Sending
from pilotfish.cli.bench.serving.texts import load_counter
from pilotfish.cli.bench.serving.workloads import sessions_of, take_sessions
from pilotfish.errors import EngineError, InputError


class OfferedRun(Struct, frozen=True):
    named: Row  # its columns in tables
    records: Sequence[SentRequest]
    tables: dict[str, list[Row]]
    broken: str  # why the endpoint was given up before its end


def run_serve(options: ServeBenchOptions, progress: ProgressBar) -> Report:
    """Exit 1 where the endpoint breaks off, with what has come until then, and where no request succeeds."""
    loads, tokenizer = loads_of(options), load_counter(options.tokenizer)
    sessions = sessions_of(options, tokenizer)
    warm = take_sessions(sessions, options.warmup) if options.warmup else []
    work = [take_sessions(sessions, options.requests) for _ in loads]
    if not all(work):
        raise InputError(f"requests: {options.trace} has too few lines for {len(loads)} loads and the warm-up")
    endpoint = find_endpoint(options)
    progress.total = sum(len(session.turns) for part in (warm, *work) for session in part)
    bench = ServeBench(options, endpoint, tokenizer if options.tokenizer else None, progress)
    bench.warm_up(warm)
    runs = []
    for load, part in zip(loads, work, strict=True):
        runs.append(bench.offer(load, part))
        if runs[-1].broken:
            break
    return report_of(runs, endpoint, progress)


class ServeBench:
    """Offers loads to an endpoint. `tokenizer` counts answers' tokens where the server does not; it may be None."""

    def __init__(
        self, options: ServeBenchOptions, endpoint: ServedEndpoint, tokenizer: Any, progress: ProgressBar
    ) -> None:
        self._options, self._endpoint, self._tokenizer, self._progress = options, endpoint, tokenizer, progress

    def warm_up(self, sessions: Sequence[RequestSession]) -> None:
        """EngineError where none of it succeeds: the rest would not either."""
        if not sessions:
            return
        sending = self._sending("warm-up")
        _run(sending.closed(sessions, 1))
        errors = [record_of(one, 0.0, None).error for one in sending.sent]
        if sending.broken or all(errors):
            reason = sending.broken or errors[0]
            raise EngineError(f"endpoint: {self._endpoint.url}: no request of the warm-up succeeded: {reason}")

    def offer(self, load: ServedLoad, sessions: Sequence[RequestSession]) -> OfferedRun:
        times = times_of(load, sessions, self._options)
        named: Row = {"setting": self._options.label or self._endpoint.model, **load.named(times)}
        sending = self._sending(", ".join(f"{name} {value}" for name, value in named.items()))
        before, began = self._endpoint.metrics(), time.perf_counter()
        if load.concurrency is not None:
            _run(sending.closed(sessions, load.concurrency))
        else:
            _run(sending.open(sessions, times))
        records = [record_of(one, began, self._tokenizer) for one in sending.sent]
        answers = total_accepted(one.accepted for one in records)
        speculation = {"answers": answers, "server's counters": counted(before, self._endpoint.metrics())}
        tables: dict[str, list[Row]] = {
            "settings": [{**named, **throughput_row(records, self._options)}],
            "latencies": [{**named, **row} for row in latency_rows(records)],
            "speculation": [{**named, "of": name, **one.row()} for name, one in speculation.items() if one],
            "acceptance": [{**named, "by_depth": answers.by_depth()}] if answers and answers.steps else [],
        }
        return OfferedRun(named, records, tables, sending.broken)

    def _sending(self, label: str) -> Sending:
        return Sending(self._endpoint, self._options.timeout, lambda: self._progress(label))


def _run(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


def report_of(runs: Sequence[OfferedRun], endpoint: ServedEndpoint, progress: ProgressBar) -> Report:
    records = [one for run in runs for one in run.records]
    whole = [one for one in records if not one.error]
    failures = Counter(one.error for one in records if one.error)
    results: dict[str, Any] = {"endpoint": endpoint.url, "model": endpoint.model}
    for name in runs[0].tables:
        results[name] = [row for run in runs for row in run.tables[name]]
    results["failures"] = [{"error": error, "requests": count} for error, count in failures.most_common()]
    results["tokens_counted_by"] = sorted({one.counted_by for one in whole})
    results["notes"] = list(_notes(runs))
    results["requests"] = [{**run.named, **to_builtins(one)} for run in runs for one in run.records]
    broken = runs[-1].broken
    results["partial"] = bool(broken)
    error = ""
    if broken:
        error = f"endpoint: {endpoint.url} broke off after {len(records)} of {progress.total} requests: {broken}"
    elif not whole:
        error = f"endpoint: {endpoint.url}: none of {len(records)} requests succeeded: {failures.most_common(1)[0][0]}"
    return Report({k: v for k, v in results.items() if v != []}, error=error, unshown=("requests", "acceptance"))


def _notes(runs: Sequence[OfferedRun]) -> Iterator[str]:
    records = [one for run in runs for one in run.records]
    if any(one.counted_by == EVENTS for one in records if not one.error):
        yield "tokens: the server tells no usage, so each event counts as one token; --tokenizer counts them"
    if not any(run.tables["speculation"] for run in runs):
        yield "speculation: the server tells nothing of it"
