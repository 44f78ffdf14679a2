"""Acceptance traces of a pair: what its target writes, and what its draft would have guessed in each token's place."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pilotfish.cli.bench.contestants import PLAIN
from pilotfish.cli.bench.options import BenchOptions
from pilotfish.cli.bench.report import ProgressBar, Report
from pilotfish.cli.bench.workload import Job, jobs_at
from pilotfish.config.fields import model_name
from pilotfish.core.drafting.level_choice import LevelShape
from pilotfish.core.scheduling.executor import NO_NODES, NO_SAMPLING, Executor, Sampling, SequenceRows
from pilotfish.core.trees.tree_copy import LEAST
from pilotfish.engine.engine import Engine
from pilotfish.errors import ParameterError
from pilotfish.plan.simulation.acceptance import AcceptanceTrace, TracedPair, TracedSequence, write_acceptance

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
