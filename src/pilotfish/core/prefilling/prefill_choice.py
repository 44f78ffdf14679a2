"""Where KV of a prompt is computed: here, or by which prefill pool.

here    [ others' prompts ][ this one ]        whoever decodes meanwhile waits longer for each token
there   [ its queue ][ all that it has no KV of ][ exposed ][ the end of the step at hand ][ a step of the last row ]
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pilotfish.core.prefilling.prefill_pools import PrefillPool
from pilotfish.core.scheduling.calibration import RecentMean, RecentRate

#: Times as long as here that a prompt may take elsewhere if it would delay others' decoding here: without the pool's
#: queue, which soon changes, and with it.
BESIDE, BESIDE_QUEUED = 1.1, 2.0
#: Shares of a step here: the rest of it, on average, when a hand-over ends; the waste in its last chunk's step.
LEFT = 0.5
#: Tokens of a prompt that is never worth a hand-over: they fit into a forward beside decoding rows.
FEW = 128
#: Tokens of a prompt that is sent to measure a hand-over.
TRIAL = 256
#: Seconds after which a pool that was not worth it is tried again: twice as many each time, so many times at most.
RETRIAL, MAX_RETRIALS = 10.0, 6


@dataclass(frozen=True)
class PrefillOption:
    """A pool that could compute KV. Seconds are None until measured."""

    pool: PrefillPool
    cached: int  # tokens whose KV it is believed to have
    there: float | None  # until they are here, and the last token's row is computed
    here: float | None  # that computing them here would take
    wait: float = 0.0  # of `there`, for the pool's earlier work

    def sooner(self, neighbours: int) -> bool:
        assert self.there is not None and self.here is not None  # or it is only tried
        if not neighbours:
            return self.there <= self.here
        return self.there - self.wait <= BESIDE * self.here and self.there <= BESIDE_QUEUED * self.here


@dataclass(frozen=True)
class PromptLoad:
    tokens: Sequence[int]
    first: int  # token without KV
    salt: bytes | None
    waiting: int  # tokens that are to be computed here before
    neighbours: int  # requests that decode here

    @property
    def missing(self) -> int:
        return len(self.tokens) - self.first


class PrefillChoice:
    def __init__(self, least: int | None, ordered: Callable[[PrefillPool], int]) -> None:
        """`least`: missing tokens from which on prompts are sent, or None. `ordered`: a pool's tokens left for us."""
        self.here = LocalSeconds()
        self._least, self._ordered = least, ordered

    def option(self, prompt: PromptLoad, pools: Sequence[PrefillPool], now: float) -> PrefillOption | None:
        if prompt.missing < (FEW if self._least is None else self._least):
            return None
        options = [self._at(pool, prompt) for pool in pools if pool.takes(len(prompt.tokens), now)]
        if not options:
            return None
        best = min(options, key=lambda one: (-1.0 if one.there is None else one.there, self._ordered(one.pool)))
        if self._least is not None:
            return best
        if best.there is None or best.here is None:
            return best if prompt.missing >= TRIAL else None
        if best.sooner(prompt.neighbours):
            best.pool.retrials = 0
            return best
        return self._retrial(options, now) if prompt.missing >= TRIAL else None

    def _at(self, pool: PrefillPool, prompt: PromptLoad) -> PrefillOption:
        cached, token, own = pool.told.known(prompt.salt, prompt.tokens), pool.token_seconds, self.here.token
        left = LEFT * self.here.step.value if prompt.neighbours else 0.0
        here = None if own is None else own * (prompt.waiting + prompt.missing) + left
        if token is None or pool.load is None:
            return PrefillOption(pool, cached, None, here)
        wait = token * max(pool.load.queued_tokens, self._ordered(pool))
        computing = token * (len(prompt.tokens) - cached)
        there = wait + computing + pool.exposed.at(prompt.missing) + self.here.step.value + left
        return PrefillOption(pool, cached, there, here, wait)

    def _retrial(self, options: Sequence[PrefillOption], now: float) -> PrefillOption | None:
        for option in options:
            pool = option.pool
            if now - pool.asked >= RETRIAL * 2.0 ** min(pool.retrials, MAX_RETRIALS):
                pool.retrials += 1
                return option
        return None


class LocalSeconds:
    LARGE = 64  # tokens of prompts in a forward that a token's time is learned from

    def __init__(self) -> None:
        self.step = RecentMean(0.1)  # of a forward without any
        self._rate = RecentRate(0.9)

    def observe(self, tokens: int, seconds: float) -> None:
        if tokens >= self.LARGE:
            self._rate.add(tokens, seconds)
        elif not tokens:
            self.step.add(seconds)

    @property
    def token(self) -> float | None:
        return 1 / self._rate.value if self._rate.value else None
