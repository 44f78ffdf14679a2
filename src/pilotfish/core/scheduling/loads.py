"""KV that running requests wait for: from tiers first, then from prefill workers.

admitted ──► load from tiers ──► hand-over ──► rows for what is left, its last token at least
             where any is        where that is sooner
"""

from collections.abc import Callable, Iterable

import numpy as np

from pilotfish.core.cache.prefix_keys import OBJECT_TOKENS, prefix_keys
from pilotfish.core.cache.slots import Slots
from pilotfish.core.cache.tiers import KVLoad, Tiers
from pilotfish.core.prefilling.handover import HandOver, Prefills
from pilotfish.core.scheduling.request import Request

Take = Callable[[int], Slots]  # takes so many slots of a pool


class Loads:
    """A request waits for one load, or one hand-over, at a time."""

    def __init__(self, tiers: Tiers | None, prefills: Prefills | None) -> None:
        self._tiers = tiers
        self._prefills = prefills

    def load(self, request: Request, take: Take) -> None:
        if self._tiers is None:
            return
        begin, skipped = divmod(request.num_computed, OBJECT_TOKENS)
        keys = prefix_keys(self._tiers.root(request.cache_salt), request.tokens[:-1])[begin:]
        if count := self._tiers.worth_loading(keys, skipped) if keys else 0:
            span = slice(begin * OBJECT_TOKENS, (begin + count) * OBJECT_TOKENS)
            tokens = np.asarray(request.tokens[span], np.int64)
            request.load = KVLoad(keys[:count], tokens, take(len(tokens) - skipped))
            self._tiers.load(request.load)

    def hand_over(self, request: Request, take: Take, waiting: int, neighbours: int) -> None:
        """Have prefill workers compute all missing KV but the last token's, if that is sooner."""
        first, tokens = request.num_computed, request.tokens[:-1]
        if self._prefills is None or first == len(tokens):
            return
        if self._prefills.worth_sending(tokens, first, request.cache_salt, waiting, neighbours):
            request.load = HandOver(tokens, take(len(tokens) - first), request.cache_salt)
            self._prefills.begin(request.load)

    def poll(self) -> None:
        if self._tiers is not None:
            self._tiers.poll()
        if self._prefills is not None:
            self._prefills.poll()

    def cancel(self, load: KVLoad | HandOver) -> None:
        if isinstance(load, KVLoad):
            assert self._tiers is not None  # who brings it
            self._tiers.cancel(load)
        else:
            assert self._prefills is not None
            self._prefills.cancel(load)

    def computed(self, tokens: int, seconds: float) -> None:
        """Forwards with few prompt tokens do not count: most of their time went elsewhere."""
        if self._tiers is not None and tokens >= OBJECT_TOKENS:
            self._tiers.computed(tokens, seconds)
        if self._prefills is not None:
            self._prefills.computed(tokens, seconds)

    def wait(self, running: Iterable[Request]) -> None:
        if self._prefills is not None and any(isinstance(request.load, HandOver) for request in running):
            self._prefills.wait()
        elif self._tiers is not None:
            self._tiers.wait()
