"""Drafters to compare over one loaded pair: models are loaded once, drafters are swapped between runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pilotfish.bench.workload import Job
from pilotfish.config import DrafterKind, EngineConfig, drafter_kinds
from pilotfish.core.budget import FixedBudget
from pilotfish.core.drafter import Drafter, DraftLimits, NoDrafter
from pilotfish.core.request import Request
from pilotfish.core.scheduler import HEADROOM
from pilotfish.core.tree import TokenTree, TreeBuilder
from pilotfish.draft.combined import CombinedDrafter
from pilotfish.draft.lm import LMDrafter
from pilotfish.draft.ngram import NgramDrafter
from pilotfish.draft.responses import ResponseCache
from pilotfish.draft.suffix import SuffixDrafter
from pilotfish.engine.engine import Engine
from pilotfish.engine.sample import Sample
from pilotfish.errors import EngineError


class RandomDrafter:
    """Trees of random shape and random tokens: half from the vocabulary, half from the sequence itself.

    A tree is a function of the request's seed and length, so a run can be repeated.
    """

    levels = 0

    def __init__(self, vocab_size: int, max_nodes: int) -> None:
        self.vocab_size = vocab_size
        self.max_nodes = max_nodes

    def propose(self, requests: Sequence[Request], limits: DraftLimits) -> list[TokenTree]:  # noqa: ARG002
        return [self._tree(request) for request in requests]

    def _tree(self, request: Request) -> TokenTree:
        rng = np.random.default_rng((request.seed, len(request.tokens)))
        tree = TreeBuilder()
        for _ in range(rng.integers(self.max_nodes + 1)):
            seen = request.tokens[rng.integers(len(request.tokens))]
            token = seen if rng.random() < 0.5 else int(rng.integers(self.vocab_size))
            tree.add(int(rng.integers(-1, len(tree))), token, -float(rng.exponential()))
        return tree.tree()

    def commit(self, request: Request, tokens: Sequence[int]) -> bool:  # noqa: ARG002
        """Nothing is held."""
        return False

    def close(self, request: Request) -> None:
        """Nothing is held."""


def check_drafter(engine: Engine) -> None:
    """EngineError if the drafter failed: a service goes on without it, a measurement of it must not."""
    if engine.worker.drafter.drafter is not engine.drafter:
        raise EngineError("bench: the drafter failed and was dropped; the log says why")


class JobRunner:
    """Runs jobs on an engine, each time with another drafter if need be."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def use(self, drafter: Drafter, nodes: int | None = None) -> None:
        """Swap the drafter, whose trees are verified in full; EngineError while requests run."""
        config = self.engine.config
        self.engine.use(drafter, FixedBudget(nodes or config.nodes, config.levels))

    def drain(self, done: Callable[[], None] = lambda: None) -> None:
        """Step until nothing is left; `done` is called for each sequence. EngineError if the drafter failed."""
        while self.engine.busy:
            for delta in self.engine.step():
                if delta.sample.finish_reason is not None:
                    done()
        check_drafter(self.engine)

    def run(
        self,
        drafter: Drafter,
        jobs: Sequence[Job],
        concurrency: int,
        done: Callable[[], None] = lambda: None,
        cache_salt: str | None = None,
        nodes: int | None = None,
        kv_slots: int | None = None,
    ) -> list[Sample]:
        """Generate all jobs, `concurrency` at a time, in order of arrival; `done` is called for each. With a
        `cache_salt` a suffix drafter guesses from outputs of jobs that ended before. With `kv_slots` the target has
        no more, and admits what only just fits, so that requests are preempted."""
        self.use(drafter, nodes)
        scheduler = self.engine.worker.scheduler
        scheduler.max_requests = concurrency
        held = scheduler.pool.allocate(0 if kv_slots is None else scheduler.pool.capacity - kv_slots)
        scheduler.headroom = HEADROOM if kv_slots is None else 1
        samples = [self.engine.submit(job.prompt.text, job.params, cache_salt)[0] for job in jobs]
        self.drain(done)
        scheduler.pool.release(held)
        return samples


class Bench(JobRunner):
    """One engine over one pair, whose drafter can be swapped while it is idle."""

    def __init__(self, config: EngineConfig) -> None:
        """`config` must be of mode sync with drafter lm."""
        super().__init__(Engine(config))
        drafter = self.engine.drafter
        if not isinstance(drafter, LMDrafter):
            raise EngineError("bench: an engine of mode sync with drafter lm is needed")
        assert self.engine.draft_runner is not None
        self.lm_drafter, self.draft_runner = drafter, self.engine.draft_runner

    def lm(self) -> LMDrafter:
        """An LM drafter over the loaded draft."""
        lm = self.lm_drafter
        return LMDrafter(lm.executor, lm.shape)

    def drafter(self, name: str) -> Drafter:
        """`off`, or what EngineConfig.drafter may name."""
        if name == "off":
            return NoDrafter()
        drafters = [self._drafter(kind) for kind in drafter_kinds(name)]
        return drafters[0] if len(drafters) == 1 else CombinedDrafter(drafters)

    def _drafter(self, kind: DrafterKind) -> Drafter:
        if kind == "lm":
            return self.lm()
        return NgramDrafter() if kind == "ngram" else SuffixDrafter(ResponseCache(self.engine.config.max_cached_tokens))
