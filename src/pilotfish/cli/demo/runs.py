"""Modes of an engine take turns on equal prompts and seeds, at a pace that the machine holds."""

import io
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from pilotfish.cli.bench.contestants import OFF, PLAIN, Run, contestant_of, periods_of, take_turns
from pilotfish.cli.bench.workload import Job, Prompt, chat_tokenizer, load_prompts
from pilotfish.cli.show import status
from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import available_cores, model_name
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.engine.engine import Engine
from pilotfish.model.pacer import Pacer

#: Of models that answer, and of those that continue code.
CHAT, CODE = (Path(__file__).with_name(f"{name}.jsonl") for name in ("chat", "code"))
WARM_UP_TOKENS = 5
#: Seconds for the timed rounds of off and sync, about, and of async, which does the same in less. A first round is made
#: to fit: shorter outputs, but of fewer prompts before they have fewer tokens than this. Later rounds that would not
#: end in time are left out.
SECONDS, ASYNC_SECONDS, SHORT = 7.0, 2.5, 32
#: How long off and sync together take for what off takes a second for on the cores that async leaves it.
OFF_AND_SYNC = 1.3

#: Milliseconds of a forward of a 70B model on four H200, and of a level of a 1B model on one.
TARGET_MS, DRAFT_MS = 10.4, 2.6
DEVICES = "a 70B target on four H200 and a 1B draft on one"
#: Of the measurement of a pace, at most.
TRIAL_SECONDS, TRIAL_ROUNDS = 3.0, 100
#: The share of forwards that must be in time while they are measured (of a run at most one in a hundred may be late),
#: and what is added to their time where they are not: a later run is no copy of the measured one.
IN_TIME, MARGIN = 0.997, 1.2

#: One run of jobs in a mode.
Play = Callable[[Sequence[Job]], Run]
#: Shows something of a warm engine.
Show = Callable[[Engine], None]


@dataclass(frozen=True)
class Scene:
    name: str  # of its object in JSON
    title: str
    pair: str
    config: EngineConfig  # of mode async
    stretch: float | None = None  # of a pace that may be stretched further; None: it is given, or there is none


@dataclass(frozen=True)
class Work:
    params: SamplingParams
    prompts: Sequence[Prompt]
    first: str  # of the prompts, as people read it

    @classmethod
    def of(cls, target: Path, params: SamplingParams) -> "Work":
        file = CHAT if chat_tokenizer(target) else CODE
        return cls(params, load_prompts(file, target=target), str(load_prompts(file)[0].text))

    def jobs(self, seed: int) -> list[Job]:
        return [Job(prompt, "", replace(self.params, seed=seed)) for prompt in self.prompts]

    def within(self, tokens: int) -> "Work":
        short = min(SHORT, self.params.max_tokens)
        prompts = self.prompts[: max(1, tokens // short)]
        most = max(1, min(self.params.max_tokens, tokens // len(prompts)))
        return replace(self, params=replace(self.params, max_tokens=most), prompts=prompts)


@dataclass(frozen=True)
class Timing:
    work: Work
    runs: dict[str, list[Run]]  # by mode
    cores: dict[str, int]  # by mode: those that the target could run on
    pacing: list[Pacer]  # of all paced models, draft workers' too
    parameters: int
    dtype: str

    @property
    def valid(self) -> bool:
        return all(pacer.valid for pacer in self.pacing)


def time_modes(
    config: EngineConfig,
    work: Work,
    rounds: int,
    *,
    quiet: bool,
    show: Show | None = None,
    seconds: float | None = None,
) -> Timing:
    """Off and the engine's own mode; of async alone, with as much of `work` as off and sync will have time for. Timed
    rounds take about `seconds`, by default the mode's own."""
    if seconds is None:
        seconds = ASYNC_SECONDS if config.mode == "async" else SECONDS
    where = "a process of its own" if config.mode == "async" else "the target's process"
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory, "timeline.json") if config.pace and config.mode == "async" else None
        with status(f"{model_name(config.target)}: loading, the draft in {where}", quiet=quiet):
            engine = Engine(replace(config, trace=trace))
        try:
            timing = _timed(engine, work, rounds, seconds, show, quiet=quiet)
        finally:
            with redirect_stderr(io.StringIO()):  # a draft worker warns that it did not keep its pace, at any time
                engine.close()
        began = timing.runs[config.mode][0].steps[0].began
        drafts = [] if trace is None else _worker_pacing(trace, config, began)
    return replace(timing, pacing=[*timing.pacing, *drafts])


def _timed(engine: Engine, work: Work, rounds: int, seconds: float, show: Show | None, *, quiet: bool) -> Timing:
    mode = engine.config.mode
    modes = {mode: contestant_of(engine)} if mode == "async" else {OFF: PLAIN, mode: contestant_of(engine)}
    plays: dict[str, Play] = {name: partial(one.run, engine, concurrency=1) for name, one in modes.items()}
    tokens = _warm_up(engine, plays, work)
    work = work.within(tokens) if mode == "async" else work
    if show is not None:
        show(engine)
    engine.reset_pacing()
    with status(f"timing {' and '.join(plays)}", quiet=quiet):
        runs = take_turns(plays, map(work.jobs, seeds_within(rounds, seconds)), warm_up=0)
    cores = dict.fromkeys(plays, available_cores())
    pacing = [replace(one, role=f"{' and '.join(plays)} {one.role}") for one in engine.pacing()]
    return Timing(work, runs, cores, pacing, engine.memory.target.parameters, engine.precision.name)


def _warm_up(engine: Engine, plays: Mapping[str, Play], work: Work) -> int:
    """Runs everything once that is slow the first time; gives the tokens for which off and sync need `SECONDS`."""
    params = replace(work.params, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
    job = replace(work, params=params, prompts=work.prompts[:1]).jobs(seed=0)
    plain = PLAIN.run(engine, job, concurrency=1)
    take_turns(plays, [job])
    period = periods_of([plain.steps])["period_ms"] / 1000
    return int(SECONDS / (OFF_AND_SYNC * period))


def _worker_pacing(trace: Path, config: EngineConfig, began: float) -> list[Pacer]:
    """Of each draft worker since `began`, read from its timeline."""
    pace, events = config.paces.draft, msgspec.json.decode(trace.read_bytes())["traceEvents"]
    if pace is None:
        return []
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    pacers = {pid: Pacer(f"async {name}", pace) for pid, name in names.items() if name.startswith("draft")}
    for event in events:
        if event["name"] == "level" and event["ts"] >= 1e6 * began:
            pacers[event["pid"]].note(event["args"]["taken"])
    return list(pacers.values())


def seeds_within(rounds: int, seconds: float) -> Iterator[int]:
    began = time.perf_counter()
    for done in range(rounds):
        if done and (time.perf_counter() - began) * (done + 1) / done > seconds:
            return
        yield done


# -- a pace that the machine holds: that of a pair of devices, stretched as far as it must be


def paced_scene(pair: str, config: EngineConfig, stretch: float) -> Scene:
    target, draft = (f"{round(milliseconds * stretch, 3):g}ms" for milliseconds in (TARGET_MS, DRAFT_MS))
    pace = f"target={target},draft={draft}"
    slowed = "" if stretch == 1 else f", {stretch:g} times slower: what this machine holds"
    title = f"{pair} at the pace of {DEVICES}{slowed} ({pace})"
    return Scene("paced", title, pair, replace(config, pace=pace), stretch)


def measured_scene(pair: str, config: EngineConfig, work: Work, *, quiet: bool) -> Scene:
    """At a pace held here, measured as it will run: both models at once, with pauses that cool caches."""
    trial = paced_scene(pair, config, 1.0)
    timing = time_modes(trial.config, work, TRIAL_ROUNDS, seconds=TRIAL_SECONDS, quiet=quiet)
    return paced_scene(pair, config, stretch_of(timing.pacing))


def slower_scene(scene: Scene, pacing: Sequence[Pacer]) -> Scene:
    assert scene.stretch is not None
    stretch = scene.stretch * MARGIN * max(1.0, _taken(pacing))
    return paced_scene(scene.pair, scene.config, math.ceil(10 * stretch) / 10)


def stretch_of(pacing: Sequence[Pacer]) -> float:
    """At least 1, such that all but a few of these forwards are in time."""
    taken = _taken(pacing)
    return 1.0 if taken <= 1 else math.ceil(10 * MARGIN * taken) / 10


def _taken(pacing: Sequence[Pacer]) -> float:
    return max((float(np.quantile(pacer.taken, IN_TIME)) for pacer in pacing if pacer.taken), default=0.0)
