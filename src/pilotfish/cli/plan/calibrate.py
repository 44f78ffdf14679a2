"""`pilotfish plan calibrate`: what this machine takes beside forwards, by steps and levels of a real engine whose
devices are paced; and forwards of the pair as they are here. `bench record`: acceptance traces of a pair, what its
target writes, and what its draft would have guessed in each token's place."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.cli.bench.contestants import OFF, PLAIN, Contestant, Run, contestant_of, has_prompt_rows, overruns
from pilotfish.cli.bench.modes.engines import Level, level_pairs, read_levels
from pilotfish.cli.bench.options import BenchOptions
from pilotfish.cli.bench.report import ProgressBar, Report, cpu_name
from pilotfish.cli.bench.workload import Job, Workload, jobs_at, load_prompts, parse_numbers
from pilotfish.cli.demo.runs import CODE
from pilotfish.config.engine import EngineConfig
from pilotfish.config.fields import model_name
from pilotfish.core.drafting.level_choice import LevelShape
from pilotfish.core.scheduling.budget import FixedBudget
from pilotfish.core.scheduling.executor import NO_NODES, NO_SAMPLING, Executor, Sampling, SequenceRows
from pilotfish.core.trees.tree_copy import LEAST
from pilotfish.engine.engine import Engine
from pilotfish.engine.trial import forward_seconds
from pilotfish.errors import EngineError, ParameterError
from pilotfish.plan.simulation.acceptance import AcceptanceTrace, TracedPair, TracedSequence, write_acceptance
from pilotfish.plan.simulation.calibration import MachineCalibration, fitted
from pilotfish.plan.simulation.setup import HostCosts
from pilotfish.workers.records import StepRecord

#: Rows whose forwards are timed.
KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
#: Levels, leaves and nodes of the trees that the target waits for here.
SYNC = (3, 4, 12)
#: Share of forwards that may be late: medians do not mind them.
MOST_OVERRUNS = 0.1
#: Seconds, assumed: a message through a socket of the same host and the thread behind it.
HOP = 100e-6


@dataclass(frozen=True)
class Measured:
    name: str
    run: Run
    concurrency: int

    @property
    def steps(self) -> Iterator[tuple[StepRecord, StepRecord]]:
        """Steps in which all sequences sampled and no prompt was read, each after the one before."""
        for before, step in pairwise(self.run.steps):
            if step.sequences == self.concurrency and not has_prompt_rows(before) and not has_prompt_rows(step):
                yield before, step


def run_calibrate(options: BenchOptions, progress: ProgressBar) -> Report:
    """EngineError where the pace is one that this machine cannot hold."""
    concurrencies = parse_numbers("concurrency", options.concurrencies)
    workload = Workload(load_prompts(CODE), options.temperature, options.max_tokens)
    rounds = {c: [job.whole for job in workload.jobs(c, turn=0)] for c in concurrencies}
    progress.total = 3 * sum(map(len, rounds.values()))
    with TemporaryDirectory() as directory:
        timeline = Path(directory) / "timeline.json"
        config = options.engine_config(mode="async", budget="fixed", trace=timeline)
        if config.paces.target is None or config.paces.draft is None:
            raise ParameterError("pace", config.pace, "of target and draft")
        measured = _measured(config, rounds, progress)
        levels = read_levels(timeline)
    host = host_costs(config, measured, levels)
    with Engine(options.engine_config(mode="sync", pace="")) as engine:  # at the machine's own speed
        drafter = engine.drafters.make_lm()
        target, draft = _pace(engine.executor, 0), _pace(drafter.executor, drafter.feature_width)
    name = config.target.name
    calibration = MachineCalibration(processor=cpu_name(), pair=name, target=target, draft=draft, host=host)
    if options.to:
        Path(options.to).write_bytes(msgspec.json.format(msgspec.json.encode(calibration)))
    return Report({"calibration": msgspec.to_builtins(calibration)})


def _measured(config: EngineConfig, rounds: Mapping[int, Sequence[Job]], progress: ProgressBar) -> list[Measured]:
    measured, (levels, width, nodes) = list[Measured](), SYNC
    with Engine(config) as engine:
        sync = Contestant(partial(engine.drafters.make_lm, width), partial(FixedBudget, nodes, levels))
        players = {OFF: PLAIN, "sync": sync, "async": contestant_of(engine)}
        for (concurrency, jobs), (name, player) in product(rounds.items(), players.items()):
            measured.append(Measured(name, _run(engine, player, jobs, concurrency, progress), concurrency))
    return measured


def _run(engine: Engine, player: Contestant, jobs: Sequence[Job], concurrency: int, progress: ProgressBar) -> Run:
    engine.reset_pacing()
    run = player.run(engine, jobs, concurrency, lambda: progress(f"{concurrency} at a time"))
    if overruns(engine) > MOST_OVERRUNS:
        raise EngineError(f"pace: this machine cannot hold {engine.config.pace} at {concurrency} sequences; take more")
    return run


def host_costs(config: EngineConfig, measured: Sequence[Measured], levels: Sequence[Level]) -> HostCosts:
    target, draft = config.paces.target, config.paces.draft
    assert target is not None and draft is not None
    counts, seconds, waited = [], [], []
    for one in measured:
        for before, step in one.steps:
            drafting = step.drafted - step.planned if one.name == "sync" else 0.0
            counts.append([1, step.sequences, step.nodes])
            seconds.append(step.ended - before.ended - drafting - target.seconds(step.rows))
            if one.name == "sync":
                waited.append(drafting / SYNC[0] - draft.seconds(SYNC[1] * step.sequences))
    step_cost, sequence, node = fitted(counts, seconds)
    pairs = [pair for one in measured if one.name == "async" for pair in level_pairs(one.run, levels)]
    level, leaf = fitted([[1, one.leaves] for one, _ in pairs], [after.began - one.ended for one, after in pairs])
    waits = fitted([[1]] * len(waited), waited)[0]
    return HostCosts(step=step_cost, sequence=sequence, node=node, level=level, leaf=leaf, waited=waits, hop=HOP)


def _pace(executor: Executor, feature_width: int) -> str:
    times = {rows: 1000 * forward_seconds(executor, rows, feature_width=feature_width) for rows in KNOTS}
    return "/".join(f"{rows}:{max(times[rows], 0.001):.3f}ms" for rows in KNOTS)


#: Guesses that are kept of each position: children of a leaf in a draft worker.
WIDTH = LevelShape().children
#: Rows of a draft's forward.
CHUNK = 64


def run_record(options: BenchOptions, progress: ProgressBar) -> Report:
    """Writes the trace to `trace`. Every output has `max_tokens`; the draft reads it once, token by token the target's
    own, as it does where all its guesses were right."""
    config = options.engine_config()
    jobs = [job.whole for job in jobs_at(options.rows(), options.temperature, options.max_tokens)]
    progress.total = 2 * len(jobs)
    with Engine(config) as engine:
        if engine.drafters.make_lm().feature_width:
            raise ParameterError("draft", str(config.draft), "a draft model: a trained head guesses from its target")
        run = PLAIN.run(engine, jobs, options.concurrency, lambda: progress("target"))
        draft, sequences = engine.drafters.draft_executor, list[TracedSequence]()
        for job, output in zip(jobs, run.outputs, strict=True):
            prompt = engine.tokenizer.encode(job.prompt.text) if isinstance(job.prompt.text, str) else job.prompt.text
            sequences.append(guessed(draft, job, prompt, output))
            progress("draft")
        assert config.draft is not None  # as in every engine with a draft model
        names = model_name(config.target), model_name(config.draft)
        pair = TracedPair(*names, options.temperature, engine.model.config.vocab_size)
    write_acceptance(Path(options.to), pair, sequences)
    trace = AcceptanceTrace.of(pair, sequences)
    among = {f"among_first_{count}": float(np.mean(trace.ranks < count)) for count in (1, 2, 4, trace.width)}
    return Report({"recorded": [{"sequences": len(trace.prompts), "tokens": len(trace.tokens), **among}]})


def guessed(draft: Executor, job: Job, prompt: Sequence[int], output: Sequence[int]) -> TracedSequence:
    """A job's output, and the draft's guesses in place of each token. Overwrites an idle draft's first slots."""
    parts = list(_guesses(draft, job, [*prompt, *output], len(prompt)))
    tokens, log_chances = (np.concatenate(part).tolist() for part in zip(*parts, strict=True))
    return TracedSequence(job.prompt.id, list(prompt), list(output), tokens, log_chances)


def _guesses(
    draft: Executor, job: Job, sequence: Sequence[int], prompt: int
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64]]]:
    """Tokens and log-chances [rows, WIDTH] of each chunk that has rows before output tokens."""
    slots, seed = np.arange(len(sequence), dtype=np.int32), job.params.seed
    assert seed is not None  # as in every job
    for start in range(0, len(sequence) - 1, CHUNK):
        end = min(start + CHUNK, len(sequence) - 1)
        kept = range(max(prompt - 1 - start, 0), end - start)
        rows = SequenceRows(start, sequence[start:end], slots[:end], NO_NODES, kept)
        positions = np.array([start + offset + 1 for offset in kept], np.int64)
        sampling = Sampling(None, [job.params], [seed], np.zeros(len(kept), np.int64), positions, children=WIDTH)
        outcome = draft.execute([rows], sampling if len(kept) else NO_SAMPLING)
        if len(kept):
            assert outcome.log_chances is not None  # as where children are asked for
            yield outcome.tokens, np.maximum(outcome.log_chances, LEAST)
