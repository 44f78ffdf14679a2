"""What grammars cost those who have none: times between the tokens of free requests beside free and beside constrained
neighbours, in turns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count

from pilotfish.bench.contestants import check_drafter, overruns
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.report import ProgressBar, Report, Row, Spread, percentile, ratios
from pilotfish.bench.workload import Job, Workload
from pilotfish.core.sampling.constraint import Constraint
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.engine.sample import Sample
from pilotfish.workers.records import StepRecord

FREE, CONSTRAINED = "free", "constrained"
#: By how much constrained neighbours may lengthen the times between a free request's tokens.
PROMISE = 1.1
_ARGUMENT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "kind": {"enum": ["int", "str", "list"]}},
    "required": ["name", "kind"],
    "additionalProperties": False,
}
_ARGUMENTS = {"type": "array", "items": _ARGUMENT, "minItems": 60, "maxItems": 100}
#: Each takes more tokens than an output has: neighbours of both kinds end as often, and bring as many prompts.
CONSTRAINTS = (
    Constraint.json(_ARGUMENTS),
    Constraint.json(_ARGUMENTS, compact=True),
    Constraint.regex(r"([a-z_]{3,12}\([a-z]{1,6}(, [a-z]{1,6}){0,6}\)\n){60,100}"),
    Constraint.grammar('start: NUM (("+" | "-" | "*") NUM){200,400}\nNUM: /[1-9][0-9]{0,3}/'),
)


@dataclass
class GapWindow:
    """What was seen in a while."""

    gaps: list[float] = field(default_factory=list)  # milliseconds between the deltas of a watched request
    steps: list[StepRecord] = field(default_factory=list)
    tokens: int = 0  # of the neighbours
    verified: int = 0  # steps of theirs

    @property
    def p99(self) -> float:
        return percentile(self.gaps, 0.99)


class Neighbourhood:
    """Watched requests, and as many neighbours; where one ends, the next of its kind takes its place."""

    def __init__(self, engine: Engine, workload: Workload, streams: int) -> None:
        self.engine = engine
        engine.worker.scheduler.max_requests = streams
        self._jobs = chain.from_iterable(workload.jobs(len(workload.prompts), lap) for lap in count())
        self._grammars = chain.from_iterable(CONSTRAINTS for _ in count())
        self._watched = [self._submit(next(self._jobs), None) for _ in range(streams // 2)]
        self._neighbours: list[Sample] = []
        self._last: dict[int, float] = {}  # when a watched request was last given tokens

    def _submit(self, job: Job, constraint: Constraint | None) -> Sample:
        params: SamplingParams = replace(job.params, structured_outputs=constraint, ignore_eos=constraint is None)
        return self.engine.submit(job.prompt.text, params)[0]

    def _neighbour(self, kind: str) -> Sample:
        return self._submit(next(self._jobs), next(self._grammars) if kind == CONSTRAINED else None)

    def run(self, kind: str, seconds: float) -> GapWindow:
        """Neighbours of one kind, new ones; their first tenth of the time warms up."""
        for sample in self._neighbours:
            self.engine.abort(sample)
        self._neighbours = [self._neighbour(kind) for _ in self._watched]
        self._step_for(kind, seconds / 10, GapWindow())
        window = GapWindow()
        self.engine.worker.observe = window.steps.append
        self._step_for(kind, seconds, window)
        self.engine.worker.observe = lambda _: None
        return window

    def _step_for(self, kind: str, seconds: float, window: GapWindow) -> None:
        end = time.perf_counter() + seconds
        self._last.clear()
        while time.perf_counter() < end:
            given = {delta.id: delta for delta in self.engine.step() if delta.tokens}
            check_drafter(self.engine)
            now = time.perf_counter()
            for sample in self._watched:
                if sample.request_id in given:
                    window.gaps += [1000 * (now - self._last[i]) for i in (sample.request_id,) if i in self._last]
                    self._last[sample.request_id] = now
            for sample in self._neighbours:
                if (delta := given.get(sample.request_id)) is not None:
                    window.tokens += len(delta.tokens)
                    window.verified += len(delta.verified)
            self._replace_ended(kind)

    def _replace_ended(self, kind: str) -> None:
        self._watched = [s if s.finish_reason is None else self._submit(next(self._jobs), None) for s in self._watched]
        self._neighbours = [s if s.finish_reason is None else self._neighbour(kind) for s in self._neighbours]


def run_constrained(options: BenchOptions, progress: ProgressBar) -> Report:
    """`repeats` rounds of both kinds of neighbours, `seconds` each, after one to warm up."""
    progress.total = 2 * (options.repeats + 1)
    rounds: dict[str, list[GapWindow]] = {FREE: [], CONSTRAINED: []}
    with Engine(options.engine_config()) as engine:
        neighbourhood = Neighbourhood(engine, options.workload(), options.streams)
        for kind in _turns(options.repeats + 1):
            rounds[kind].append(neighbourhood.run(kind, options.seconds))
            progress(kind)
        late = overruns(engine)
    return report_of({kind: windows[1:] for kind, windows in rounds.items()}, late)


def _turns(number: int) -> Iterator[str]:
    """Who is first alternates."""
    for turn in range(number):
        yield from (FREE, CONSTRAINED) if turn % 2 == 0 else (CONSTRAINED, FREE)


def report_of(rounds: dict[str, list[GapWindow]], late: float) -> Report:
    """Times between tokens of the watched requests by the kind of their neighbours; where a step's time went."""
    gaps = []
    for kind, windows in rounds.items():
        together = [gap for window in windows for gap in window.gaps]
        row: Row = {"neighbours": kind, "gaps": len(together), "p50_ms": percentile(together, 0.5)}
        row["p99_ms"] = Spread.of([window.p99 for window in windows])
        row["neighbours_tokens_per_verify_step"] = sum(w.tokens for w in windows) / sum(w.verified for w in windows)
        gaps.append(row)
    p99 = {kind: [window.p99 for window in windows] for kind, windows in rounds.items()}
    ratio = ratios(p99[CONSTRAINED], p99[FREE])
    steps = [_steps_of(kind, [step for window in windows for step in window.steps]) for kind, windows in rounds.items()]
    found = {"p99_ratio": ratio, "promise": PROMISE, "overruns": late, "holds": ratio.median <= PROMISE}
    return Report({"gaps": gaps, "steps": steps, **found})


def _steps_of(kind: str, records: Sequence[StepRecord]) -> Row:
    """Medians in milliseconds. `verify` ends with the masks, which it waits for, and the tokens."""
    parts = [{name: 1000 * (end - begin) for name, (begin, end) in record.parts.items()} for record in records]
    return {
        "neighbours": kind,
        "steps": len(records),
        **{f"{name}_ms": percentile([part[name] for part in parts], 0.5) for name in parts[0]},
        "nodes": sum(record.nodes for record in records) / len(records),
    }
