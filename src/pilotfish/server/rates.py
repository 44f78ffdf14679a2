"""Rates: what a client may take per minute, and how fast requests have been ending. Time is an argument, in seconds."""

from __future__ import annotations

import math

MAX_RETRY = 60  # seconds: an estimate further ahead is none
#: What rounding may make of a bucket's level: that little less than an amount is enough for it.
_ROUNDING = 1e-6


def retry_after(seconds: float) -> int:
    """An estimate as the header Retry-After gives it: whole seconds, 1 to MAX_RETRY."""
    return max(1, math.ceil(min(seconds, MAX_RETRY)))


class Bucket:
    """A token bucket: `per_minute` flow in evenly, up to a minute's worth, and whatever is there can be taken at once.
    In any t seconds at most (1 + t / 60) times `per_minute` are taken. None: as much as anybody likes."""

    def __init__(self, per_minute: int | None, now: float) -> None:
        self.per_minute = per_minute
        self._level = math.inf if per_minute is None else float(per_minute)
        self._at = now

    def seconds(self, amount: int, now: float) -> float:
        """How long until `amount`, at most a minute's worth, is there; 0 when it is."""
        self._refill(now)
        missing = amount - self._level
        return 0.0 if self.per_minute is None or missing <= _ROUNDING else missing * 60 / self.per_minute

    def take(self, amount: int, now: float) -> None:
        """Take what `seconds` has found there."""
        self._refill(now)
        self._level -= amount

    def put_back(self, amount: int, now: float) -> None:
        """What was taken and not used."""
        self._refill(now)
        self._fill(amount)

    def _refill(self, now: float) -> None:
        self._fill((self.per_minute or 0) * (now - self._at) / 60)
        self._at = now

    def _fill(self, amount: float) -> None:
        if self.per_minute is not None:
            self._level = min(self._level + amount, self.per_minute)


class Completions:
    """How many sequences end per second while there are any: an exponentially weighted mean over half a minute."""

    TIME_CONSTANT = 30.0

    def __init__(self, now: float) -> None:
        self._sum = 0.0  # of what ended, weighted by age
        self._weight = 0.0  # of the seconds observed: below 1 at first, which is made up for
        self._at = now

    def resume(self, now: float) -> None:
        """There are sequences again: the idle time before says nothing."""
        self._at = now

    def observe(self, ended: int, now: float) -> None:
        decay = math.exp((self._at - now) / self.TIME_CONSTANT)
        self._sum = self._sum * decay + ended / self.TIME_CONSTANT
        self._weight = self._weight * decay + 1 - decay
        self._at = now

    def seconds(self, sequences: float, now: float) -> float:
        """How long until that many more have ended, at the observed rate; infinity where none has."""
        self.observe(0, now)
        if sequences == 0:
            return 0.0
        return sequences * self._weight / self._sum if self._sum > 0 else math.inf
