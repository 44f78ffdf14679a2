"""What a grammar adds to a step of the target: steps that verify full trees, with a grammar and without."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pilotfish.bench.constrained import CONSTRAINTS
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.report import ProgressBar, Report, Row, percentile
from pilotfish.core.drafting.drafter import Drafter, DraftLimits
from pilotfish.core.sampling.constraint import Constraint, GrammarState, constrained, words
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.tree import OTHER, ROOT, Guesses
from pilotfish.engine.engine import Engine
from pilotfish.workers.records import StepRecord

#: By how much of a step without a grammar one with a grammar may be longer.
PROMISE = 0.05
#: Draws for a tree, in multiples of its nodes: where little is legal they meet nodes that are there.
PATIENCE = 4


class LegalDrafter(Drafter):
    """Random trees of so many nodes, all legal: no model writes more that a grammar has to look at. What they take is
    not measured."""

    levels = 0

    def __init__(self, nodes: int, vocab_size: int) -> None:
        self._nodes, self._vocab_size = nodes, vocab_size
        self._draw = random.Random(0)
        self._bits = np.zeros(words(vocab_size), np.int32)
        self.walk_seconds: list[float] = []  # that the grammar's look at each tree took

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[Guesses]:
        return [self._tree(request, limits) for request in requests]

    def _tree(self, request: Request, limits: DraftLimits) -> Guesses:
        tree, paths = Guesses(), {ROOT: list[int]()}
        for _ in range(PATIENCE * self._nodes):
            parent = self._draw.choice(list(paths)[-3:])  # long and narrow, as drafts' trees are
            if (token := self._token(request.grammar, paths[parent])) is None or len(tree) == self._nodes:
                continue
            node = tree.add(parent, token, -0.1 * len(tree), OTHER)
            paths.setdefault(node, [*paths[parent], token])
        if request.grammar is not None:
            began = time.perf_counter()
            constrained(tree, request.grammar, limits.nodes)  # as the guard will do
            self.walk_seconds.append(time.perf_counter() - began)
        return tree

    def _token(self, state: GrammarState | None, path: Sequence[int]) -> int | None:
        """Any that may follow a path."""
        if state is None:
            return self._draw.randrange(self._vocab_size)
        state.mask(path, self._bits)
        legal = np.flatnonzero(np.unpackbits(self._bits.view(np.uint8), bitorder="little")[: self._vocab_size])
        return int(self._draw.choice(legal.tolist())) if len(legal) else None


@dataclass(frozen=True)
class Steps:
    """Milliseconds of the steps of one output."""

    after_draft: list[float]  # from the trees to the step's end
    verify: list[float]  # from the logits to the tokens
    walk: float  # mean look at a tree; part of the time before
    nodes: float  # mean of the trees


def run_masked_steps(options: BenchOptions, progress: ProgressBar) -> Report:
    """An output without a grammar and one of each grammar take turns, `repeats` times after one to warm up."""
    kinds: list[Constraint | None] = [None, *CONSTRAINTS]
    progress.total = (options.repeats + 1) * len(kinds)
    config = replace(options.engine_config(drafter="ngram", budget="fixed", mode="sync"), draft=None)
    found: list[list[Steps]] = [[] for _ in kinds]
    with Engine(config) as engine:
        drafter = LegalDrafter(config.nodes, engine.model.config.vocab_size)
        engine.use(drafter, engine.worker.budget)
        jobs = options.rounds(1)
        for turn in jobs:
            for kind, own in zip(kinds, found, strict=True):
                params = replace(turn[0].params, structured_outputs=kind, ignore_eos=True)
                engine.submit(turn[0].prompt.text, params)
                own.append(_steps_of(engine, drafter))
                progress("steps")
    return report_of([steps[1:] for steps in found])


def _steps_of(engine: Engine, drafter: LegalDrafter) -> Steps:
    """The steps of the one request that runs, but for those of its prompt."""
    records = list[StepRecord]()
    engine.worker.observe = records.append
    drafter.walk_seconds.clear()
    while engine.busy:
        engine.step()
    decoding = [record for record in records if record.nodes]
    walk = statistics.mean(drafter.walk_seconds or [0.0])
    return Steps(
        [1000 * (record.ended - record.drafted) for record in decoding],
        [1000 * (record.verified - record.computed) for record in decoding],
        1000 * walk,
        statistics.mean([record.nodes for record in decoding] or [0]),
    )


def report_of(found: Sequence[Sequence[Steps]]) -> Report:
    """The first are those without a grammar. `added` is what a step takes more, the look at its tree included, over a
    step without a grammar, by medians."""
    rows = [_row("none" if place == 0 else f"{place}", steps) for place, steps in enumerate(found)]
    plain = rows[0]["median_ms"]
    for row in rows:
        row["added"] = (row["median_ms"] + row["walk_ms"]) / plain - 1
    return Report({"steps": rows, "promise": PROMISE, "holds": all(row["added"] < PROMISE for row in rows)})


def _row(name: str, steps: Sequence[Steps]) -> Row:
    times = [value for one in steps for value in one.after_draft]
    return {
        "grammar": name,
        "steps": len(times),
        "nodes": statistics.mean(one.nodes for one in steps),
        "median_ms": statistics.median(times),
        "p90_ms": percentile(times, 0.9),
        "walk_ms": statistics.mean(one.walk for one in steps),
        "verify_ms": statistics.median(value for one in steps for value in one.verify),
    }
