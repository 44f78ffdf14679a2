"""A request's effect on the logits of one row: bias, penalties and exclusions, on the row's own path.

    prompt ─ output ─┬─ a ─┬─ b     the row of b is judged with prompt, output, a and b as its history;
                     │     └─ c     that of c never hears of b
                     └─ d

Sparse: a few token ids a row. `model/rules.py` applies them to tensors.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.errors import ParameterError

Ids = NDArray[np.int64]
_NONE: Ids = np.zeros(0, np.int64)


@dataclass(frozen=True)
class SeenTokens:
    """Those that penalties may lower, of prompt and output."""

    tokens: Ids  # [s] without repeats
    counts: Ids  # [s] how often each occurs in the output
    known: frozenset[int]  # the tokens

    @classmethod
    def of(cls, counts: Mapping[int, int]) -> "SeenTokens":
        tokens, times = np.fromiter(counts, np.int64, len(counts)), np.fromiter(counts.values(), np.int64, len(counts))
        return cls(tokens, times, frozenset(counts))

    def new(self, path: Sequence[int]) -> dict[int, int]:
        """How often tokens that are not among these are along `path`."""
        return Counter(token for token in path if token not in self.known)


@dataclass(frozen=True)
class LogitEdits:
    """Edits of one row, in this order."""

    allowed: Ids | None  # all other tokens are excluded; None: nothing is
    biased: Ids  # [b], without repeats
    biases: NDArray[np.float64]  # [b], added
    seen: SeenTokens | None  # the same object for all rows of a history; None: nothing is penalized
    path: Sequence[int]  # after it; its tokens are seen too
    excluded: Ids  # may repeat


class LogitRules:
    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        stop_ids: frozenset[int],
        bad_sequences: Sequence[Sequence[int]],
    ) -> None:
        self._history = list(prompt)
        self._last_forced = len(prompt) + params.min_tokens  # sequences shorter than this may not end
        self._stop_ids = np.array(sorted(stop_ids), np.int64)
        self._allowed = None if params.allowed_token_ids is None else np.array(params.allowed_token_ids, np.int64)
        bias = params.logit_bias
        self._biased = np.fromiter(bias, np.int64, len(bias))
        self._biases = np.fromiter(bias.values(), np.float64, len(bias))
        self._sequences = [tuple(s) for s in bad_sequences if len(s) > 1]
        single = [s[0] for s in bad_sequences if len(s) == 1]
        self._bad = np.array([*params.bad_token_ids, *single], np.int64)
        self._counts: dict[int, int] | None = dict.fromkeys(prompt, 0) if _penalizes(params) else None
        self._seen: SeenTokens | None = None  # of those counts, until they change

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        prompt: Sequence[int],
        stop_ids: frozenset[int],
        bad_sequences: Sequence[Sequence[int]] = (),
    ) -> "LogitRules | None":
        """None where the parameters leave logits as they are."""
        excludes = bool(params.bad_token_ids or bad_sequences or (params.min_tokens and stop_ids))
        touches = params.allowed_token_ids is not None or params.logit_bias or _penalizes(params) or excludes
        return cls(params, prompt, stop_ids, bad_sequences) if touches else None

    def extend(self, tokens: Sequence[int]) -> None:
        self._history.extend(tokens)
        if self._counts is not None:
            for token in tokens:
                self._counts[token] = self._counts.get(token, 0) + 1
            self._seen = None

    def edits(self, path: Sequence[int]) -> LogitEdits:
        """For the row that follows the history and then `path`."""
        if self._counts is not None and self._seen is None:
            self._seen = SeenTokens.of(self._counts)
        stops = self._stop_ids if len(self._history) + len(path) < self._last_forced else _NONE
        completed = [s[-1] for s in self._sequences if self._ends_with(path, s[:-1])]
        excluded = np.concatenate((self._bad, stops, np.array(completed, np.int64)))
        return LogitEdits(self._allowed, self._biased, self._biases, self._seen, path, excluded)

    def _ends_with(self, path: Sequence[int], suffix: Sequence[int]) -> bool:
        missing = len(suffix) - len(path)
        if missing <= 0:
            return tuple(path[-len(suffix) :]) == tuple(suffix)
        return tuple(self._history[-missing:]) + tuple(path) == tuple(suffix)


def _penalizes(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


def check_token_ids(
    params: SamplingParams, stop_ids: frozenset[int], bad_sequences: Sequence[Sequence[int]], vocab_size: int
) -> None:
    """ParameterError for ids outside the vocabulary, and for rules that could exclude every token."""
    fields = ("logit_bias", "allowed_token_ids", "bad_token_ids", "stop_token_ids")
    for field in fields:
        for token in getattr(params, field) or ():
            if token >= vocab_size:
                raise ParameterError(field, token, f"token ids 0 to {vocab_size - 1}")
    never = {*params.bad_token_ids, *(s[-1] for s in bad_sequences), *(stop_ids if params.min_tokens else ())}
    allowed = params.allowed_token_ids
    left = set(range(vocab_size) if allowed is None else allowed) - never if never or allowed is not None else {0}
    if not left:
        field = "bad_token_ids" if allowed is None else "allowed_token_ids"
        raise ParameterError(field, getattr(params, field), "at least one token that can never be excluded")
