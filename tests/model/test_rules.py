"""What rules, masks and another vocabulary make of logits, against plain loops and torch; what is drawn below them."""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support import RowSampling, reference_probs, sampling_of
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from pilotfish.core.sampling.constraint import words
from pilotfish.core.sampling.logit_rules import LogitEdits
from pilotfish.core.sampling.noise import gumbel
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import Sampling, SharedTokens, TokenMasks
from pilotfish.core.scheduling.request import Request
from pilotfish.core.trees.tree import NO_TOKEN
from pilotfish.model.sampling import draw, edited, likely_tokens, masked, masked_reference, sample

pytestmark = pytest.mark.usefixtures("kernels")

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


PROCESSORS = [
    ({"repetition_penalty": 1.7}, (), RepetitionPenaltyLogitsProcessor(1.7)),
    ({"logit_bias": {3: 2.5, 8: -1.0}}, (), SequenceBiasLogitsProcessor([[[3], 2.5], [[8], -1.0]])),
    ({}, BAD, NoBadWordsLogitsProcessor(BAD, eos_token_id=None)),
    ({"min_tokens": 3}, (), MinNewTokensLengthLogitsProcessor(3, 3, sorted(STOPS))),
]


@pytest.mark.parametrize(("params", "bad", "processor"), PROCESSORS, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("output", [[], [1, 2], [2, 2, 9, 1]])
def test_edits_are_those_of_transformers(params: Any, bad: Any, processor: Any, output: list[int]) -> None:
    request = request_of(params, [1, 8, 2], output, bad)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    want = processor(torch.tensor([request.tokens]), logits.clone())
    torch.testing.assert_close(edited(logits, sampling_of([after(request)])).float(), want.float())


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


# -- masks


def masks_of(allowed: np.ndarray, samples: list[int]) -> TokenMasks:
    """allowed: bool [m, tokens]."""
    padded = np.zeros((len(allowed), words(allowed.shape[1]) * 32), np.bool_)
    padded[:, : allowed.shape[1]] = allowed
    bits = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    return TokenMasks(np.array(samples), lambda: lambda: bits)


def with_masks(sampling: Sampling, masks: TokenMasks) -> Sampling:
    return replace(sampling, masks=masks)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 64, 100, 4096])
def test_what_is_forbidden_is_minus_infinity_and_nothing_else_changes(vocab: int) -> None:
    rng, samples = np.random.default_rng(vocab), [0, 2, 3]
    for tokens, density in itertools.product((vocab, max(vocab - 40, 1), vocab + 40), (0.0, 0.03, 0.5, 1.0)):
        allowed = rng.random((3, tokens)) < density
        logits = torch.from_numpy(rng.normal(size=(5, vocab)).astype(np.float32))
        before = logits.clone()
        want = before.clone()
        for row, which in zip(samples, allowed, strict=True):
            for token in range(vocab):
                if token >= tokens or not which[token]:
                    want[row, token] = -torch.inf
        masks = masks_of(allowed, samples)
        assert torch.equal(masked(logits, masks), want)
        assert torch.equal(masked_reference(logits, masks), want)
        assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}])
def test_filters_come_after_the_mask(temperature: float, filters: dict[str, float]) -> None:
    rng, vocab, draws = np.random.default_rng(1), 40, 4000
    logits, allowed = rng.normal(size=vocab).astype(np.float32), rng.random(vocab) < 0.3
    params = SamplingParams(temperature=temperature, **filters)
    rows = [RowSampling(params, 5, position) for position in range(draws)]
    masks = masks_of(np.tile(allowed, (draws, 1)), list(range(draws)))
    drawn = sample(torch.from_numpy(np.tile(logits, (draws, 1))), with_masks(sampling_of(rows), masks))
    want = reference_probs(np.where(allowed, logits, -np.inf), params)
    counts = np.bincount(drawn, minlength=vocab) / draws
    assert set(np.flatnonzero(counts)) <= set(np.flatnonzero(want))
    assert np.abs(counts - want).max() < 0.04


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_nothing_is_allowed_no_token_is_drawn(temperature: float) -> None:
    logits, rows = torch.zeros(3, 40), [RowSampling(SamplingParams(temperature=temperature), 1, p) for p in range(3)]
    allowed = np.zeros((2, 40), np.bool_)
    allowed[1, 7] = True
    assert sample(logits, with_masks(sampling_of(rows), masks_of(allowed, [0, 2])))[0::2] == [NO_TOKEN, 7]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_guesses_what_is_allowed_alone(temperature: float) -> None:
    logits, rows = torch.zeros(2, 40), [RowSampling(SamplingParams(temperature=temperature), 1, p) for p in range(2)]
    allowed = np.zeros((1, 40), np.bool_)
    allowed[0, [3, 9]] = True
    tokens, chances = likely_tokens(logits, with_masks(sampling_of(rows, children=4), masks_of(allowed, [1])))
    assert set(tokens[1][chances[1] > -np.inf].tolist()) == {3, 9}
    assert np.isfinite(chances[0]).all()


# -- children that a draft of another vocabulary gives


def random_shared(generator: np.random.Generator, draft: int, target: int, both: int) -> SharedTokens:
    return SharedTokens(np.sort(generator.permutation(target)[:both]), generator.permutation(draft)[:both])


def drawn_of(logits: torch.Tensor, shared: Sequence[SharedTokens | None], **options: Any) -> tuple[Any, Any]:
    rows = [RowSampling(SamplingParams(temperature=0.9 * (i % 3 > 0)), 7 + i, 20 + i) for i in range(len(logits))]
    sampling = replace(sampling_of(rows, children=5), rows=None, vocabularies=list(shared), **options)
    return draw(logits, [], sampling)


def test_samples_of_several_vocabularies_are_drawn_as_if_apart() -> None:
    generator = np.random.default_rng(1)
    kinds = [random_shared(generator, 90, 200, 40), None, random_shared(generator, 90, 64, 30)]
    logits = 3 * torch.randn(9, 90, generator=torch.Generator().manual_seed(0))
    each = [kinds[i % 3] for i in range(9)]
    none = np.zeros(0, np.int64)
    edits = [LogitEdits(None, none, np.zeros(0), None, (), np.array([i, i + 7])) if i % 2 else None for i in range(9)]
    samples = np.array([0, 3, 4, 8])
    bits = generator.integers(-(2**31), 2**31, (4, 7)).astype(np.int32)
    together = drawn_of(logits, each, edits=edits, masks=TokenMasks(samples, lambda: lambda: bits))
    for i, one in enumerate(each):
        rows = [RowSampling(SamplingParams(temperature=0.9 * (i % 3 > 0)), 7 + i, 20 + i, edits[i])]
        place = samples.tolist().index(i) if i in samples else None
        masks = None if place is None else TokenMasks(np.array([0]), partial(lambda own: lambda: own, bits[[place]]))
        alone = replace(sampling_of(rows, children=5), rows=None, vocabularies=[one], masks=masks)
        tokens, chances = draw(logits[[i]], [], alone)
        np.testing.assert_array_equal(together[0][i], tokens[0])
        np.testing.assert_allclose(together[1][i], chances[0], rtol=1e-5)


def test_the_noise_is_that_of_the_targets_ids() -> None:
    generator = np.random.default_rng(2)
    shared, logits = random_shared(generator, 90, 300, 50), torch.randn(3, 90)
    tokens, _ = drawn_of(logits, [shared] * 3)
    for row in (1, 2):
        scores = np.full(300, -np.inf)
        scores[shared.ids] = logits[row].double().numpy()[shared.columns] / 0.9
        assert tokens[row].tolist() == np.argsort(-(scores + gumbel(7 + row, 20 + row, 300)))[:5].tolist()


def test_a_draft_with_few_tokens_of_the_targets_has_few_children() -> None:
    shared = random_shared(np.random.default_rng(3), 90, 300, 2)
    tokens, chances = drawn_of(torch.randn(2, 90), [shared, None])
    assert set(tokens[0, :2].tolist()) == set(shared.ids.tolist())
    assert np.isneginf(chances[0, 2:]).all() and (chances[1] > -np.inf).all()


def test_rows_that_are_not_finite_have_no_children() -> None:
    shared, logits = random_shared(np.random.default_rng(4), 90, 300, 20), torch.randn(2, 90)
    logits[1, 5] = torch.nan
    rows = [RowSampling(SamplingParams(), 1, 1), RowSampling(SamplingParams(), 1, 1)]
    sampling = replace(sampling_of(rows, children=5), rows=None, vocabularies=[shared, shared])
    _, chances = draw(logits, [1], sampling)
    assert chances is not None and np.isneginf(chances[1]).all() and (chances[0] > -np.inf).all()
