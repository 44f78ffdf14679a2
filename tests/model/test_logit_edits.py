"""Edits of logits against plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import RowSampling, sampling_of

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import Request
from pilotfish.model.sampling import edited

VOCAB = 12
STOPS = frozenset({11, 7})
BAD = [[4], [2, 3], [1, 2, 5]]

PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "repetition_penalty": st.sampled_from([0.5, 1.3]),
        "presence_penalty": st.sampled_from([-1.0, 0.7]),
        "frequency_penalty": st.sampled_from([-0.5, 0.4]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5, 5), max_size=4),
        "allowed_token_ids": st.sets(st.integers(0, VOCAB - 1), min_size=1).map(tuple),
        "bad_token_ids": st.sets(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
        "min_tokens": st.integers(0, 4),
    },
)
HISTORY = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)


def request_of(params: dict[str, Any], prompt: list[int], output: list[int], bad: Any = BAD) -> Request:
    request = Request(0, prompt, SamplingParams(**params), 0, STOPS, 100, bad)
    if request.rules is not None:
        request.rules.extend(output)
    request.tokens += output
    return request


def after(request: Request, path: list[int] | None = None) -> RowSampling:
    """How the token after `path` is drawn."""
    edits = None if request.rules is None else request.rules.edits(path or [])
    return RowSampling(request.params, request.seed, len(request.tokens), edits)


def loops(logits: np.ndarray, request: Request, path: list[int], bad: Any = BAD) -> np.ndarray:
    """The documented order, one token after the other."""
    p, history = request.params, request.tokens + path
    output = history[request.num_prompt_tokens :]
    result = []
    for token, z in enumerate(logits.astype(np.float64)):
        if p.allowed_token_ids is not None and token not in p.allowed_token_ids:
            z = -np.inf
        z += p.logit_bias.get(token, 0.0)
        if token in history:
            z = z / p.repetition_penalty if z > 0 else z * p.repetition_penalty
        z -= p.frequency_penalty * output.count(token)
        z -= p.presence_penalty * (token in output)
        ends = token in STOPS and len(output) < p.min_tokens
        completes = any([*history, token][-len(s) :] == s for s in bad)
        result.append(-np.inf if token in p.bad_token_ids or ends or completes else z)
    return np.array(result)


@given(rows=st.lists(st.tuples(PARAMS, HISTORY, HISTORY, HISTORY), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_edits_are_the_documented_ones_row_by_row(rows: list[Any], seed: int) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed))
    requests = [request_of(params, prompt, output) for params, prompt, output, _ in rows]
    samples = [after(request, path) for request, (*_, path) in zip(requests, rows, strict=True)]
    got = edited(logits, sampling_of(samples))
    for i, (request, (*_, path)) in enumerate(zip(requests, rows, strict=True)):
        np.testing.assert_allclose(got[i].numpy(), loops(logits[i].numpy(), request, path), rtol=1e-12, atol=1e-12)


def test_rows_without_rules_keep_their_logits() -> None:
    logits = torch.randn(2, VOCAB)
    plain, biased = (request_of({}, [1], [], bad=()), request_of({"logit_bias": {3: 1.0}}, [1], [], bad=()))
    assert edited(logits, sampling_of([after(plain), after(plain)])) is logits
    mixed = edited(logits, sampling_of([after(plain), after(biased)]))
    assert torch.equal(mixed[0], logits[0].double())
    assert mixed[1, 3] == logits[1, 3].double() + 1.0


def test_a_smaller_vocabulary_skips_foreign_ids() -> None:
    params = {"logit_bias": {11: 5.0, 1: 1.0}, "allowed_token_ids": (1, 9, 11), "repetition_penalty": 2.0}
    request = request_of(params, [9, 1], [])
    whole, part = torch.randn(1, VOCAB), None
    part = edited(whole[:, :8], sampling_of([after(request)]))
    assert torch.equal(part, edited(whole, sampling_of([after(request)]))[:, :8])
