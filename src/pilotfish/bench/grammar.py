"""What grammars cost over the corpus: to compile one, a token of it, and the masks of a step's tree. No model."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLExecutor, LLMatcher

from pilotfish.bench.corpus import Entry, entries
from pilotfish.bench.options import BenchOptions
from pilotfish.bench.report import ProgressBar, Report, Row, Spread, cpu_name, percentile
from pilotfish.core.sampling.constraint import Constraint, MaskedPaths, words
from pilotfish.engine.pairs import resolve_pair
from pilotfish.errors import InputError
from pilotfish.grammar.compile import Grammars
from pilotfish.grammar.state import MatcherState
from pilotfish.grammar.threads import MaskJobs

#: The parent of each of 16 nodes, -1 the root.
SHAPES: Mapping[str, Sequence[int]] = {
    "one chain of 16": range(-1, 15),
    "4 chains of 4": [i - 1 if i % 4 else -1 for i in range(16)],
    "doubling": [(i - 2) // 2 for i in range(16)],
    "16 leaves": [-1] * 16,
}
#: Trees of each shape below an output; numbers of threads that compute their masks; a paced step, in seconds.
TREES, THREADS, STEP = 2, (1, 2), 0.010

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Planted:
    """A tree below the first tokens of an output."""

    entry: Entry
    shape: str
    committed: Sequence[int]
    paths: Sequence[Tokens]  # the root's, which is empty, and each node's


class Bed:
    """The corpus in the tokens of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.encode: Callable[[str], list[int]] = lambda text: tokenizer.encode(text, add_special_tokens=False)
        self.vocab_size = len(tokenizer)
        self.grammars = Grammars(tokenizer, self.vocab_size, [])
        self.entries = list(entries())

    def state(self, entry: Entry, committed: Sequence[int] = ()) -> MatcherState:
        state = MatcherState(self.grammars.compile(entry.constraint).deep_copy())
        for token in committed:
            state.extend(token)
        return state

    def planted(self, entry: Entry, rng: random.Random) -> Iterator[Planted]:
        """Of each shape, at random places of a valid output; none where so few tokens are legal that it lacks nodes."""
        tokens = self.encode(entry.valid[-1])
        for shape, parents in SHAPES.items():
            for _ in range(TREES):
                committed = tokens[: rng.randrange(len(tokens))]
                paths = self._grow(self.state(entry, committed), parents, tokens[len(committed) :], rng)
                if len(paths) == len(parents) + 1:
                    yield Planted(entry, shape, committed, paths)

    def _grow(
        self, state: MatcherState, parents: Sequence[int], onward: Sequence[int], rng: random.Random
    ) -> list[Tokens]:
        """A parent's first child goes on as the output does, where it can; the others are any legal tokens."""
        paths, bits = list[Tokens]([()]), np.zeros(words(self.vocab_size), np.int32)
        for parent in parents:
            if parent + 1 >= len(paths):
                break
            above = paths[parent + 1]
            state.mask(above, bits)
            legal = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()
            likely = onward[len(above) : len(above) + 1] if above == tuple(onward[: len(above)]) else []
            picks = [*likely, *rng.sample(legal, min(4 * len(parents), len(legal)))]
            children = ((*above, token) for token in picks if (*above, token) not in paths)
            child = next(filter(state.allows, children), None)
            if child is None:
                break
            paths.append(child)
        return paths


def run_grammar(options: BenchOptions, progress: ProgressBar) -> Report:
    seconds, bed = timed(lambda: _bed(options))
    prepared, _ = timed(lambda: bed.grammars.compile(Constraint.regex("a")))  # starts the trial's process, too
    progress.total = len(bed.entries) + options.repeats * len(THREADS)
    compiling, trees = dict[str, list[float]](), list[Planted]()
    one_token: dict[str, list[float]] = {"mask": [], "consume": [], "take back": [], "fork": []}
    rng = random.Random(0)
    for entry in bed.entries:
        kind = type(entry.source).__name__.lower()
        compiling.setdefault(kind, []).append(timed(lambda: bed.grammars.compile(entry.constraint))[0])  # noqa: B023
        for text in entry.valid:
            _walk(bed.state(entry), bed, bed.encode(text), one_token)
        trees += bed.planted(entry, rng)
        progress(entry.name)
    rows = [row for threads in THREADS for row in _masks(bed, trees, threads, options.repeats, progress)]
    return Report(
        {
            "cpu": cpu_name(),
            "vocabulary": bed.vocab_size,
            "tokenizer_seconds": seconds + prepared,
            "compiling_ms": [{"of": kind, "number": len(own), **_spread(own, 1e3)} for kind, own in compiling.items()],
            "tokens_us": [{"what": what, "number": len(own), **_spread(own, 1e6)} for what, own in one_token.items()],
            "masks_of_trees_ms": rows,
        }
    )


def _bed(options: BenchOptions) -> Bed:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not options.tokenizer:
        return Bed(AutoTokenizer.from_pretrained(resolve_pair("pycode").target))
    if not Path(options.tokenizer).is_file():
        raise InputError(f"tokenizer: {options.tokenizer} is no file; expected a tokenizer.json")
    return Bed(PreTrainedTokenizerFast(tokenizer_file=options.tokenizer))


def _walk(state: MatcherState, bed: Bed, tokens: Sequence[int], spent: Mapping[str, list[float]]) -> None:
    """Along an output, on the matcher alone."""
    matcher: LLMatcher = state._matcher
    bits = np.zeros(words(bed.vocab_size), np.int32)
    for token in tokens:
        copying, copy = timed(matcher.deep_copy)
        spent["fork"].append(copying)
        spent["mask"].append(timed(lambda: copy.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes))[0])  # noqa: B023
        spent["consume"].append(timed(lambda: matcher.consume_token(token))[0])  # noqa: B023
        spent["take back"].append(timed(lambda: matcher.rollback(1))[0])
        matcher.consume_token(token)


def _masks(bed: Bed, trees: Sequence[Planted], threads: int, repeats: int, progress: ProgressBar) -> Iterator[Row]:
    """The masks of root and nodes, from a plan on, as a step computes them."""
    executor = LLExecutor(threads)
    spent: dict[str, list[float]] = {shape: [] for shape in SHAPES}
    for turn in range(repeats):
        for tree in trees:
            masked = MaskedPaths(bed.state(tree.entry, tree.committed), tree.paths)
            spent[tree.shape].append(timed(lambda: MaskJobs([masked], words(bed.vocab_size)).compute(executor))[0])  # noqa: B023
        progress(f"masks on {threads} threads, {turn + 1}")
    for shape, own in spent.items():
        share = statistics.mean(own) / STEP
        yield {"tree": shape, "threads": threads, "number": len(own), **_spread(own, 1e3), "mean_of_10_ms": share}


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = call()
    return time.perf_counter() - began, result


def _spread(seconds: Sequence[float], scale: float) -> Row:
    scaled = [scale * one for one in seconds]
    p99 = percentile(scaled, 0.99)
    return {"mean": statistics.mean(scaled), "median": Spread.of(scaled), "p99": p99, "worst": max(scaled)}
