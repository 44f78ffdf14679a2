from math import log, log2

from msgspec import Struct

#: Least tokens, or steps, of a mean: with fewer it is too skewed for a logarithm.
ENOUGH = 8


class GuardReading(Struct, frozen=True, kw_only=True):
    """Sums since the last reading over a variant's outputs that may speculate now; for the holdout over all. During a
    trial, requests without speculation do not count."""

    tokens: int = 0  # that came a step after others of their output
    itl_seconds: float = 0.0  # between the steps that gave an output these tokens and the steps before
    steps: int = 0
    guessable: int = 0  # of the steps, those that asked for guesses
    accepted: int = 0  # tokens, in these
    sharing: int = 0  # sequences among which these shared out their guesses, summed

    def __add__(self, other: "GuardReading") -> "GuardReading":
        names = self.__struct_fields__
        return GuardReading(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def has_times(self) -> bool:
        return self.tokens > 0 and self.itl_seconds > 0 and self.steps > 0

    @property
    def token_ms(self) -> float:
        return 1000 * self.itl_seconds / self.tokens

    @property
    def log_token_seconds(self) -> float:
        return log(self.itl_seconds) - log(self.tokens)

    @property
    def load(self) -> int:
        """The power of two nearest to the mean sequences that shared a guessable step."""
        return round(log2(max(self.sharing / self.guessable, 1)))

    @property
    def acceptance(self) -> float:
        return self.accepted / self.guessable

    @property
    def log_step_tokens(self) -> float:
        return log(self.tokens / self.steps)


NOTHING = GuardReading()


class Comparison(Struct, frozen=True):
    own: GuardReading
    holdout: GuardReading

    @property
    def slowdown(self) -> float:
        """Log of the variant's time a token over the holdout's: below 0 the variant is faster."""
        return self.own.log_token_seconds - self.holdout.log_token_seconds

    @property
    def scale(self) -> float:
        return 1 / self.own.tokens + 1 / self.holdout.tokens

    def unbiased_slowdown(self, variance: float) -> float:
        """Corrects for noise of relative `variance` in a token's time: the log of a noisy mean is too low by half the
        mean's variance (delta method)."""
        return self.slowdown + variance * (1 / self.own.tokens - 1 / self.holdout.tokens) / 2

    def joined(self, other: "Comparison | None") -> "Comparison":
        return self if other is None else Comparison(self.own + other.own, self.holdout + other.holdout)

    def __str__(self) -> str:
        return f"{_ms(self.own)} a token, holdout {_ms(self.holdout)}"


class ReadingPairs:
    """Joins seconds until both have enough tokens. Those in which either has none are left out: loads must be equal."""

    def __init__(self) -> None:
        self._own = self._holdout = NOTHING

    def add(self, own: GuardReading, holdout: GuardReading) -> Comparison | None:
        if not (own.has_times and holdout.has_times):
            return None
        own, holdout = self._own + own, self._holdout + holdout
        enough = min(own.tokens, holdout.tokens) >= ENOUGH
        self._own, self._holdout = (NOTHING, NOTHING) if enough else (own, holdout)
        return Comparison(own, holdout) if enough else None


def _ms(reading: GuardReading) -> str:
    return f"{reading.token_ms:.{1 if reading.token_ms >= 10 else 2}f} ms"
