"""What KV of tokens costs, computed here or handed over, as measured."""

from __future__ import annotations

import numpy as np


class LocalSeconds:
    """What forwards here take: of about the last ten that computed KV of prompts, the larger ones count for more."""

    FADES = 0.9
    LARGE = 64  # tokens of prompts in a forward that says what one of them takes

    def __init__(self) -> None:
        self.step = 0.0  # of a forward without any; 0 before one was measured
        self._tokens = self._seconds = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        if tokens >= self.LARGE:
            self._tokens = self.FADES * self._tokens + tokens
            self._seconds = self.FADES * self._seconds + seconds
        elif not tokens:
            self.step = seconds + self.FADES * (self.step - seconds) if self.step else seconds

    @property
    def token(self) -> float | None:
        """Of a prompt's token; None before it was measured."""
        return self._seconds / self._tokens if self._tokens else None


class ExposedSeconds:
    """Seconds that hand-overs take on top of waiting and computing, by their tokens: as measured for powers of two,
    straight lines between them. Of fewer tokens it is what the fewest took, of more it grows with them. It is no less
    than what was lost with one that was given up, until one has come again."""

    RATE = 0.3

    def __init__(self) -> None:
        self._means: dict[int, float] = {}  # by the power
        self._lost = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        key = 1 << tokens.bit_length() - 1
        mean = self._means.get(key, seconds)
        self._means[key] = mean + self.RATE * (seconds - mean)
        self.forgive()

    def forgive(self) -> None:
        self._lost = 0.0

    def lose(self, seconds: float) -> None:
        self._lost = max(self._lost, seconds)

    def at(self, tokens: int) -> float:
        """0 before anything was measured."""
        return max(self._measured(tokens), self._lost)

    def _measured(self, tokens: int) -> float:
        if not self._means:
            return 0.0
        known = sorted(self._means)
        beyond = max(tokens / known[-1], 1.0)
        return float(np.interp(tokens, known, [self._means[key] for key in known])) * beyond
