import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate

import numpy as np
from llguidance import LLExecutor, LLMatcher

from pilotfish.core.sampling.constraint import Bits, Constraint, GrammarState, MaskedPaths, PendingGrammar, words
from pilotfish.errors import ParameterError
from pilotfish.grammar.compile import Grammars
from pilotfish.grammar.state import MaskChain, MaskPlan, MatcherState, allow

#: Threads that compute masks, at most; by default half of the cores.
MAX_MASK_THREADS = 8


class GrammarThreads:
    def __init__(self, grammars: Grammars) -> None:
        self.grammars = grammars
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._masks = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._executor = LLExecutor(max(1, min(len(os.sched_getaffinity(0)) // 2, MAX_MASK_THREADS)))

    def close(self) -> None:
        self._compiler.shutdown(cancel_futures=True)
        self._masks.shutdown(cancel_futures=True)
        self.grammars.close()

    def warm(self) -> None:
        """Prepare for the first grammar: a vocabulary of 128,000 tokens takes seconds."""
        self.compile(Constraint.regex("a"))

    def compile(self, constraint: Constraint) -> Future[LLMatcher]:
        """The future raises ParameterError for a grammar that cannot be compiled. Known grammars wait for no other."""
        done = Future[LLMatcher]()
        try:
            known = self.grammars.known(constraint)
        except ParameterError as error:
            done.set_exception(error)
            return done
        if known is None:
            return self._compiler.submit(self.grammars.compile, constraint)
        done.set_result(known)
        return done

    def pending(self, constraint: Constraint) -> PendingGrammar:
        compiled = self.compile(constraint)

        def state() -> GrammarState | None:
            if not compiled.done() or compiled.exception() is not None:
                return None
            return MatcherState(compiled.result(), constraint.after, constraint.opening)

        return state

    def masks(self, masked: Sequence[MaskedPaths], vocab_size: int) -> Callable[[], Bits]:
        return self._masks.submit(self._masks_of, masked, words(vocab_size)).result

    def _masks_of(self, masked: Sequence[MaskedPaths], size: int) -> Bits:
        plans = []
        for one in masked:
            assert isinstance(one.state, MatcherState)  # made by `state` or `pending`
            plans.append(one.state.plan(one.paths))
        rows = self._computed([chain for plan in plans for chain in plan.chains])
        none, left = rows[:0], iter(rows)
        bits = [_own_bits(one, plan, left, rows.shape[1]) for one, plan in zip(masked, plans, strict=True)]
        return fitted(np.concatenate([none, *bits]), size)

    def _computed(self, chains: Sequence[MaskChain]) -> Bits:
        """A row for each place of each chain, [places, words]."""
        starts = list(accumulate((len(chain.samples) for chain in chains), initial=0))
        rows = np.zeros((starts[-1], words(self.grammars.vocab_size)), np.int32)
        placed = list(zip(chains, starts, strict=False))
        long = [(chain.matcher, start, chain.tokens) for chain, start in placed if chain.tokens]
        short = [(chain.matcher, start) for chain, start in placed if not chain.tokens]
        place = (rows.ctypes.data, rows.shape[1] * rows.itemsize, len(rows))
        if long:
            self._executor.unsafe_compute_mask_ptr_with_draft_token(long, *place)
        if short:
            self._executor.unsafe_compute_mask_ptr(short, *place)
        return rows


def _own_bits(one: MaskedPaths, plan: MaskPlan, rows: Iterator[Bits], words: int) -> Bits:
    """[paths, words]. Nothing is allowed where a limit was reached."""
    bits, limited = np.zeros((len(one.paths), words), np.int32), list[int]()
    bits[plan.free] = -1
    for chain in plan.chains:
        for samples, row in zip(chain.samples, rows, strict=False):
            bits[samples] = row
            limited += samples if chain.matcher.is_error() else ()
    for place in plan.opening:
        allow(bits[place], plan.opening_token)
    for sample in limited:  # the state judges them one by one
        one.state.mask(one.paths[sample], bits[sample])
    return bits


def fitted(bits: Bits, size: int) -> Bits:
    """The first `size` words, for a model with another number of embeddings. Others are forbidden."""
    if bits.shape[1] >= size:
        return np.ascontiguousarray(bits[:, :size])
    return np.pad(bits, ((0, 0), (0, size - bits.shape[1])))
