"""Children that a draft of another vocabulary gives: the target's ids, by its noise, masks and rules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from support import RowSampling, sampling_of

from pilotfish.core.sampling.logit_rules import LogitEdits
from pilotfish.core.sampling.noise import gumbel
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import SharedTokens, TokenMasks
from pilotfish.model.sampling import draw

pytestmark = pytest.mark.usefixtures("kernels")


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
    edits = [LogitEdits(None, none, np.zeros(0), none, none, np.array([i, i + 7])) if i % 2 else None for i in range(9)]
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
