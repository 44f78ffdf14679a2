"""What a caller may ask of sampling, checked when it is made."""

from __future__ import annotations

from dataclasses import dataclass

from pilotfish.core.noise import SEED_LIMIT
from pilotfish.errors import ParameterError, refuse_unknown

MIN_TOP_P = 1e-6
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_SAMPLES = 128


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one request. ParameterError names the first field that cannot be.

    The target's distribution is softmax(logits / temperature), filtered by `min_p`, then `top_k`, then
    `top_p` (of what is left); temperature 0 takes the arg max. `top_k` 0 keeps all. `seed` None draws
    64 random bits, which the output reports. Generation ends at a stop id, at the model's end of
    sequence, at a stop string (which the text then lacks), or after `max_tokens`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1

    def __post_init__(self) -> None:
        _require_number("temperature", self.temperature, 0.0, 100.0)
        _require_integer("top_k", self.top_k, 0, 1 << 31)
        _require_number("top_p", self.top_p, MIN_TOP_P, 1.0)
        _require_number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _require_integer("seed", self.seed, 0, SEED_LIMIT - 1)
        _require_integer("max_tokens", self.max_tokens, 1, 1 << 31)
        _require_integer("n", self.n, 1, MAX_SAMPLES)
        self._check_stops()

    def _check_stops(self) -> None:
        for field in ("stop", "stop_token_ids"):
            value = getattr(self, field)
            if not isinstance(value, tuple) or len(value) > MAX_STOPS:
                raise ParameterError(field, value, f"a tuple of at most {MAX_STOPS}")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
                raise ParameterError("stop", text, f"strings of 1 to {MAX_STOP_LENGTH} characters")
        for token in self.stop_token_ids:
            _require_integer("stop_token_ids", token, 0, 1 << 31)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def _require_number(field: str, value: object, low: float, high: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high:  # type: ignore[operator]  # NaN fails the comparison
        raise ParameterError(field, value, f"a number {low:g} to {high:g}")


def _require_integer(field: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ParameterError(field, value, f"an integer {low} to {high}")
