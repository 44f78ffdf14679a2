"""What a caller may ask of sampling, checked when it is made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from pilotfish.core.noise import SEED_LIMIT
from pilotfish.core.plain_values import plain, plain_tuple
from pilotfish.errors import ParameterError, refuse_unknown

MIN_TOP_P = 1e-6
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_SAMPLES = 128
MAX_TOKEN_IDS = 16384
MAX_BAD_WORDS = 64
MAX_LOGPROBS = 20


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one request. ParameterError names the first field that cannot be. Lists and numpy arrays are kept
    as tuples, numpy's numbers as Python's.

    A token's logits go, in vLLM's order, through `allowed_token_ids` (all others are excluded), `logit_bias`,
    `repetition_penalty` (of tokens in prompt or output: positive logits are divided, others multiplied),
    `frequency_penalty` (times the count in the output) and `presence_penalty` (once, if in the output). Never
    given: `bad_token_ids`, the last token of one of the `bad_words` where the ones before it stand already, and,
    until there are `min_tokens`, tokens that would end the output.

    The target's distribution is then softmax(logits / temperature), filtered by `min_p`, then `top_k`, then
    `top_p` (of what is left); temperature 0 takes the arg max. `top_k` 0 and -1 keep all. `seed` None draws
    53 random bits, which the output reports. Generation ends at a stop id, at the model's end of
    sequence (not with `ignore_eos`), at a stop string (one text or a list of them; those that are complete before
    `min_tokens` do not count), or after `max_tokens`. The text lacks the stop string or the token that ended it,
    unless `include_stop_str_in_output`, and special tokens, unless `skip_special_tokens` is false.

    `logprobs` n reports the log-probability of each output token, and of the n likeliest, under the model's own
    distribution (raw logits, temperature 1, no filters); `prompt_logprobs` n does so for the prompt's tokens.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    seed: int | None = None
    max_tokens: int = 128
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        self._make_plain()
        for name, low, high in _NUMBERS:
            _require_number(name, getattr(self, name), low, high)
        for name, smallest, largest in _INTEGERS:
            _require_integer(name, getattr(self, name), smallest, largest)
        for name, most in (("logprobs", MAX_LOGPROBS), ("prompt_logprobs", MAX_LOGPROBS), ("seed", SEED_LIMIT - 1)):
            if getattr(self, name) is not None:
                _require_integer(name, getattr(self, name), 0, most)
        if self.min_tokens > self.max_tokens:
            raise ParameterError("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(name, getattr(self, name), "true or false")
        self._check_texts()
        self._check_token_ids()

    def _make_plain(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            object.__setattr__(self, item.name, plain_tuple(value) if item.name in _LISTS else plain(value))
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if isinstance(self.logit_bias, Mapping):
            bias = {plain(token): plain(value) for token, value in self.logit_bias.items()}
            object.__setattr__(self, "logit_bias", bias)

    def _check_texts(self) -> None:
        for name, count in (("stop", MAX_STOPS), ("bad_words", MAX_BAD_WORDS)):
            _require_list(name, getattr(self, name), count)
            for text in getattr(self, name):
                if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH or not is_text(text):
                    raise ParameterError(name, text, f"strings of 1 to {MAX_STOP_LENGTH} characters")

    def _check_token_ids(self) -> None:
        ids = {"stop_token_ids": MAX_STOP_TOKEN_IDS, "bad_token_ids": MAX_TOKEN_IDS}
        if self.allowed_token_ids is not None:
            ids["allowed_token_ids"] = MAX_TOKEN_IDS
        for name, count in ids.items():
            _require_list(name, getattr(self, name), count)
            for token in getattr(self, name):
                _require_integer(name, token, 0, 1 << 31)
        if not isinstance(self.logit_bias, Mapping) or len(self.logit_bias) > MAX_TOKEN_IDS:
            raise ParameterError("logit_bias", self.logit_bias, f"a mapping of at most {MAX_TOKEN_IDS} token ids")
        for token, bias in self.logit_bias.items():
            _require_integer("logit_bias", token, 0, 1 << 31)
            _require_number("logit_bias", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


_NUMBERS = (
    ("temperature", 0.0, 100.0),
    ("top_p", MIN_TOP_P, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 0.01, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")
_LISTS = ("allowed_token_ids", "bad_token_ids", "bad_words", "stop", "stop_token_ids")
_INTEGERS = (
    ("top_k", 0, 1 << 31),
    ("max_tokens", 1, 1 << 31),
    ("min_tokens", 0, 1 << 31),
    ("n", 1, MAX_SAMPLES),
)


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8: half a surrogate pair, which JSON can spell, cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _require_number(field: str, value: object, low: float, high: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high:  # type: ignore[operator]  # NaN fails the comparison
        raise ParameterError(field, value, f"a number {low:g} to {high:g}")


def _require_integer(field: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ParameterError(field, value, f"an integer {low} to {high}")


def _require_list(field: str, value: object, most: int) -> None:
    if not isinstance(value, tuple) or len(value) > most:
        raise ParameterError(field, value, f"a list of at most {most}")
