"""Masks on logits, against plain loops and torch's operations, and what is drawn below them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from support import RowSampling, reference_probs, sampling_of

from pilotfish.core.sampling.constraint import words
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import Sampling, TokenMasks
from pilotfish.core.trees.tree import NO_TOKEN
from pilotfish.model.cpu.native import load_kernels
from pilotfish.model.sampling import likely_tokens, masked, masked_reference, sample

load_kernels()


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


def test_without_masks_logits_are_left_alone() -> None:
    logits = torch.zeros(2, 8)
    assert masked(logits, None) is logits


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
