"""The settings of speculation that a workload gains most from, searched by successive halving and measured again."""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from pilotfish.cli.bench.contestants import OFF, Run, over, rates
from pilotfish.cli.bench.modes.engines import Engines
from pilotfish.cli.bench.modes.run import UNSHOWN, by_request, invalid, latency_rows, measured_rows
from pilotfish.cli.bench.modes.settings import FIELDS, Setting, even_splits, grid_of
from pilotfish.cli.bench.options import BenchOptions
from pilotfish.cli.bench.report import ProgressBar, Report, Row, Spread, write_toml
from pilotfish.cli.bench.workload import Job, Workload
from pilotfish.config.engine import EngineConfig

Candidate = TypeVar("Candidate", bound=Hashable)
#: Plays candidates in so many rounds, in turns; a score of each, more is better.
PlayRounds = Callable[[Sequence[Candidate], int], Mapping[Candidate, float]]
#: The name of what a pair is served with where nobody says otherwise.
DEFAULT = "default"
#: Rounds of the first rung.
FIRST_ROUNDS = 2


@dataclass
class Search:
    """Candidates played in turns beside off, each round on the next prompts of a shuffled file."""

    engines: Engines
    off: Setting
    rounds: Iterator[list[Job]]
    concurrency: int
    progress: ProgressBar
    tried: list[Row] = field(default_factory=list)

    def play(self, settings: Sequence[Setting], rounds: int) -> dict[Setting, float]:
        """Medians of the speed-up over off. A first round is to warm up."""
        jobs = list(islice(self.rounds, rounds + 1))
        found = self.engines.play([self.off, *settings], jobs, self.concurrency, self.progress)
        ratios = {one: over(one.name, OFF, found) for one in (self.off, *settings)}
        rung = len({row["rung"] for row in self.tried}) + 1
        self.tried += [self._row(rung, one, found[one.name], ratio) for one, ratio in ratios.items()]
        return {one: ratios[one].median for one in settings}

    def _row(self, rung: int, setting: Setting, runs: Sequence[Run], ratio: Spread) -> Row:
        played = {"setting": setting.name, "rung": rung, "rounds": len(runs)}
        return {**played, "tokens_per_second": Spread.of(rates(runs)), "over_off": ratio}


def run_tune(options: BenchOptions, progress: ProgressBar) -> Report:
    """Searches among off, the default, and `candidates` settings drawn from the grid; then the winner, the default and
    off play `repeats` fresh rounds, and what is reported, and written to `save`, is the best of these."""
    off, *grid = grid_of(options if options.splits else replace(options, splits=" ".join(even_splits())))
    fields = {name: getattr(EngineConfig, name) for name in FIELDS["sync"]}  # what `serve` does with a pair
    default = Setting(DEFAULT, "sync", {**fields, "draft": options.models().draft})
    chosen = [default, *sample(grid, options.candidates, options.seed)]
    number = options.concurrency * options.batches
    total = sum((count + 1) * (rounds + 1) for count, rounds in rungs(len(chosen), FIRST_ROUNDS))
    progress.total = number * (total + 3 * (options.repeats + 1))
    rounds = rounds_of(options.workload(), number, options.seed)
    base = options.engine_config(max_requests=max(32, options.concurrency))
    with Engines(base, options.engines) as engines:
        search = Search(engines, off, rounds, options.concurrency, progress)
        winner = halve(chosen, FIRST_ROUNDS, search.play)
        jobs = list(islice(rounds, options.repeats + 1))
        last = list(dict.fromkeys((off, default, winner)))
        progress.total -= number * (3 - len(last)) * (options.repeats + 1)
        final = engines.play(last, jobs, options.concurrency, progress)
    measured = measured_rows(final, options.concurrency, engines.levels)
    best = max(last, key=lambda one: over(one.name, OFF, final).median)
    results = {
        "tried": search.tried,
        "settings": measured,
        "latencies": latency_rows(final, options.concurrency),
        "invalid": invalid(measured),
        "chosen": best.name,
        "gain": over(best.name, OFF, final),
        "verdict": verdict(best, over(best.name, OFF, final)),
        **by_request({options.concurrency: final}, {options.concurrency: jobs[1:]}),
    }
    if options.save is not None:
        said = f"{results['verdict']}; {options.concurrency} at a time"
        write_toml(said, config_of_setting(best, options), options.save)
    return Report(results, unshown=UNSHOWN)


def sample(grid: Sequence[Setting], number: int, seed: int) -> list[Setting]:
    places = Random(seed).sample(range(len(grid)), min(number, len(grid)))
    return [grid[place] for place in sorted(places)]


def rounds_of(workload: Workload, number: int, seed: int) -> Iterator[list[Job]]:
    """Rounds without end: each has the next `number` prompts of the shuffled file, with seeds of their own."""
    prompts = list(workload.prompts)
    Random(seed).shuffle(prompts)
    numbered = enumerate(cycle(prompts))
    jobs = (prompt.job(workload.temperature, workload.max_tokens, offset) for offset, prompt in numbered)
    while True:
        yield list(islice(jobs, number))


def rungs(candidates: int, first: int) -> list[tuple[int, int]]:
    """How many play, and how many rounds, until one of two is to be chosen; at least one rung."""
    steps = [(candidates, first)]
    while steps[-1][0] > 2:
        steps.append(((steps[-1][0] + 1) // 2, 2 * steps[-1][1]))
    return steps


def halve(candidates: Sequence[Candidate], first: int, play: PlayRounds[Candidate]) -> Candidate:
    """The best in the last rung of successive halving (Jamieson, Talwalkar, 2016); of equal ones the first."""
    left = list(candidates)
    for count, rounds in rungs(len(left), first):
        left = left[:count]
        scores = play(left, rounds)
        left.sort(key=lambda one: -scores[one])
    return left[0]


def verdict(best: Setting, gain: Spread) -> str:
    if best.name == OFF:
        return "off wins: speculation does not pay for this workload here"
    return f"{best.name} makes {gain.median:.2f} tokens ({gain.lower:.2f} – {gain.upper:.2f}) while off makes one"


def config_of_setting(best: Setting, options: BenchOptions) -> dict[str, Any]:
    models = options.models()
    changes: Mapping[str, Any] = best.changes()
    kept = ("dtype", "quantization", "threads")
    rest = {name: value for name, value in options.engine.items() if name in kept and value}
    found = {"target": models.target, "draft": None if best.mode == OFF else changes["draft"], **changes, **rest}
    said = {name: value for name, value in found.items() if value not in (None, "")}
    return {name: str(value) if isinstance(value, Path) else value for name, value in said.items()}
