"""What sampling cannot be asked is refused at once, in one line that names the field."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.errors import InputError, ParameterError, PilotfishError

TOO_MANY = dict.fromkeys(range(16385), 0.0)
NO_IDS: list[Any] = [3, (-1,), (1.5,), ("a",), [True]]
IMPOSSIBLE: dict[str, list[Any]] = {
    "temperature": [-0.1, math.nan, math.inf, 101.0, "1", None, True],
    "top_k": [-2, 1.5, "3", None, True],
    "top_p": [0.0, -0.5, 1.01, math.nan, "0.9", None],
    "min_p": [-0.01, 1.5, math.nan, None],
    "seed": [-1, 1 << 64, 1.0, "7", np.float64(1.0), np.True_],
    "max_tokens": [0, -3, 2.0, None],
    "n": [0, -1, 129, 1.0, None],
    "stop": [None, "", ("",), (3,), ("a",) * 17, ["a"] * 17, "x" * 1025, ("x" * 1025,), [["a"]], {"a"}],
    "stop_token_ids": [*NO_IDS, (1,) * 1025, np.array([True]), np.array([[1]]), np.array([1.0])],
    "repetition_penalty": [0.0, -1.0, math.nan, 101.0, "1", None],
    "presence_penalty": [-2.1, 2.1, math.nan, None, True],
    "frequency_penalty": [-2.1, 2.1, math.inf, None],
    "logit_bias": [None, (1, 2), *({token: 1.0} for token in (True, -1, "1")), {1: 101.0}, {1: math.nan}, TOO_MANY],
    "allowed_token_ids": [*NO_IDS, tuple(TOO_MANY)],
    "bad_token_ids": [None, *NO_IDS, tuple(TOO_MANY)],
    "bad_words": ["text", ("",), (3,), ("a",) * 65],
    "min_tokens": [-1, 1.0, None, 129],
    "ignore_eos": [None, 1, "yes"],
    "include_stop_str_in_output": [None, 1, "yes"],
    "skip_special_tokens": [None, 0, "no"],
    "logprobs": [-1, 21, 1.0, True],
    "prompt_logprobs": [-1, 21, "3"],
    "structured_outputs": ({"json": {}}, "{}"),
}


@pytest.mark.parametrize(("field", "value"), [(f, v) for f, values in IMPOSSIBLE.items() for v in values])
def test_impossible_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "kept"),
    [
        *(("temperature", 0, 0), ("temperature", 100, 100), ("top_p", 1, 1), ("min_p", 1.0, 1.0)),
        *(("seed", (1 << 64) - 1, (1 << 64) - 1), ("n", 128, 128), ("stop", ("a",) * 16, ("a",) * 16)),
        ("stop_token_ids", (1,) * 1024, (1,) * 1024),  # up to here the limits themselves
        ("stop", "text", ("text",)),
        *(("stop", ["a", "b"], ("a", "b")), ("stop", np.array(["a", "b"]), ("a", "b"))),
        *(("bad_words", ["a"], ("a",)), ("top_k", -1, 0), ("top_k", np.int64(-1), 0)),
        *(("temperature", np.float32(0.5), 0.5), ("temperature", np.int8(2), 2)),
        *(("seed", np.uint64((1 << 64) - 1), (1 << 64) - 1), ("max_tokens", np.int32(5), 5)),
        *(("ignore_eos", np.True_, True), ("logprobs", np.int64(3), 3)),
        *(("stop_token_ids", [1, np.int64(2)], (1, 2)), ("stop_token_ids", np.array([1, 2], np.uint16), (1, 2))),
        *(("allowed_token_ids", np.array([1, 2]), (1, 2)), ("logit_bias", {np.int64(4): np.float64(1.5)}, {4: 1.5})),
    ],
)
def test_what_is_possible_is_kept_as_pythons(field: str, value: object, kept: object) -> None:
    params = SamplingParams(**{field: value})
    assert getattr(params, field) == kept
    assert type(getattr(params, field)) is type(kept)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


def test_every_field_is_covered_and_others_are_refused() -> None:
    assert IMPOSSIBLE.keys() == SamplingParams.__dataclass_fields__.keys()
    with pytest.raises(ValueError, match="top_q: there is no such option"):
        SamplingParams(top_q=0.5)  # type: ignore[call-arg]


def test_refusals_are_value_errors() -> None:
    assert issubclass(ParameterError, InputError)
    assert issubclass(InputError, ValueError)
    assert issubclass(InputError, PilotfishError)
