"""The parameters of a request, declared once: the command line and the HTTP bodies are derived from here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Annotated

import numpy as np

from pilotfish.core.sampling.constraint import Constraint
from pilotfish.core.sampling.noise import SEED_LIMIT
from pilotfish.errors import ParameterError
from pilotfish.options import check_options, option, options_of, refuse_unknown, text

MAX_TOKENS = 1 << 31
MAX_SAMPLES = 128
MAX_LOGPROBS = 20
MAX_TOKEN_IDS = 16384

sampled = partial(option, panel="Sampling")
TokenId = Annotated[int, option("", 0, 1 << 31)]
Text = Annotated[str, text(1, 1024)]


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one request. ParameterError names the first bad field. Lists and numpy arrays are kept as tuples,
    numpy's numbers as Python's.

    A token's logits go, in vLLM's order, through `allowed_token_ids` (others are excluded), `logit_bias`,
    `repetition_penalty` (of tokens in prompt or output: positive logits are divided, others multiplied),
    `frequency_penalty` (times the count in the output) and `presence_penalty` (once, if in the output). Never given:
    `bad_token_ids`, the last token of a `bad_words` entry after its others, and, before `min_tokens`, tokens that would
    end the output. Before all this `structured_outputs` leaves only tokens that its grammar allows; an output ends when
    it is whole and nothing can follow.

    The target's distribution is then softmax(logits / temperature), filtered by `min_p`, `top_k` (0 and -1 keep all),
    then `top_p` (of the rest); temperature 0 takes the arg max. `seed` None draws 53 random bits, which the output
    reports. Generation ends at a stop id, the model's end of sequence (not with `ignore_eos`), a stop string (one or a
    list; those complete before `min_tokens` do not count), or after `max_tokens`. The text lacks the stop string or
    token, unless `include_stop_str_in_output`, and special tokens, unless `skip_special_tokens` is false.

    `logprobs` n reports each output token's log-probability, and the n likeliest, under the model's own distribution
    (raw logits, temperature 1, no filters); `prompt_logprobs` n does so for the prompt.
    """

    max_tokens: Annotated[int, option("New tokens at most.", 1, MAX_TOKENS)] = 128
    min_tokens: Annotated[int, sampled("No end of sequence and no stop before.", 0, MAX_TOKENS)] = 0
    temperature: Annotated[float, option("0: always the likeliest token.", 0, 100)] = 1.0
    top_k: Annotated[int, sampled("Keep the k likeliest tokens; 0: all.", 0, 1 << 31)] = 0
    top_p: Annotated[float, sampled("Keep the likeliest tokens of this mass.", 1e-6, 1)] = 1.0
    min_p: Annotated[float, sampled("Drop tokens below this share of the best.", 0, 1)] = 0.0
    repetition_penalty: Annotated[float, sampled("Above 1: less of what came before.", 0.01, 100)] = 1.0
    presence_penalty: Annotated[float, sampled("Off logits of tokens in the output.", -2, 2)] = 0.0
    frequency_penalty: Annotated[float, sampled("The same, times their count.", -2, 2)] = 0.0
    logit_bias: Annotated[
        Mapping[TokenId, Annotated[float, option("", -100, 100)]],
        sampled("Added to the logits of these tokens.", most=MAX_TOKEN_IDS, metavar="ID=BIAS"),
    ] = field(default_factory=dict)
    allowed_token_ids: (
        Annotated[Sequence[TokenId], sampled("Give no other token.", most=MAX_TOKEN_IDS, names=("--allowed-token-id",))]
        | None
    ) = None
    bad_token_ids: Annotated[
        Sequence[TokenId], sampled("Never give this token.", most=MAX_TOKEN_IDS, names=("--bad-token-id",))
    ] = ()
    bad_words: Annotated[Sequence[Text], sampled("Never write this.", most=64, names=("--bad-word",))] = ()
    stop: Annotated[Sequence[Text], sampled("End before this text.", most=16)] = ()
    stop_token_ids: Annotated[
        Sequence[TokenId], sampled("End at this token.", most=1024, names=("--stop-token-id",))
    ] = ()
    ignore_eos: Annotated[bool, sampled("Go on after the end of sequence.")] = False
    include_stop_str_in_output: Annotated[bool, sampled("Keep the stop string in the text.")] = False
    skip_special_tokens: Annotated[bool, sampled("Leave special tokens out of the text.")] = True
    seed: Annotated[int, option("0 to 2^64 - 1; drawn and reported if absent.", 0, SEED_LIMIT - 1)] | None = None
    n: Annotated[int, sampled("Outputs of each prompt.", 1, MAX_SAMPLES)] = 1
    logprobs: Annotated[int, sampled("Report log-probabilities, of the n likeliest too.", 0, MAX_LOGPROBS)] | None = (
        None
    )
    prompt_logprobs: Annotated[int, sampled("The same for the prompt's tokens.", 0, MAX_LOGPROBS)] | None = None
    structured_outputs: Constraint | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, _plain_field(item.name, getattr(self, item.name)))
        check_options(self)
        if not isinstance(self.structured_outputs, Constraint | None):
            raise ParameterError("structured_outputs", self.structured_outputs, "a Constraint")
        if self.min_tokens > self.max_tokens:
            raise ParameterError("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


#: The declaration of each parameter, by name: type, default, bounds, help text.
SAMPLING_OPTIONS = options_of(SamplingParams)


def plain(value: object) -> object:
    return value.item() if isinstance(value, np.bool_ | np.integer | np.floating) else value


def _plain_field(name: str, value: object) -> object:
    if name == "stop" and isinstance(value, str):
        return (value,)
    if name == "top_k" and isinstance(plain(value), int) and value == -1:
        return 0
    if name == "logit_bias" and isinstance(value, Mapping):
        return {plain(token): plain(bias) for token, bias in value.items()}
    if options_of(SamplingParams)[name].kind is not tuple:
        return plain(value)
    value = value.tolist() if isinstance(value, np.ndarray) else value
    return tuple(map(plain, value)) if isinstance(value, list | tuple) else value
