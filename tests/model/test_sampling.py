"""Sampling: filters in the documented order, and the noise of core. `test_exactness` has the distribution."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import RowSampling, columns_of, reference_probs, sampling_of
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from pilotfish.core.sampling import noise
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.model.sampling import (
    Filters,
    filtered,
    filtered_reference,
    perturbed_topk,
    perturbed_topk_reference,
    sample,
)

FILTERS = [
    {},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 10_000},
    {"top_p": 0.5},
    {"top_p": 1e-6},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 1.7, "min_p": 0.02, "top_k": 20, "top_p": 0.8},
    {"temperature": 0.7, "min_p": 0.05, "top_k": 50},
]
SEEDS = st.integers(0, noise.SEED_LIMIT - 1)


pytestmark = pytest.mark.usefixtures("kernels")


def random_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def row(seed: int, position: int = 0, **params: object) -> RowSampling:
    return RowSampling(SamplingParams(**params), seed, position)  # type: ignore[arg-type]


def filtered_by(logits: torch.Tensor, every: list[SamplingParams]) -> torch.Tensor:
    return filtered(logits, columns_of([RowSampling(params, 0, 0) for params in every]))


# -- noise, three times


@given(
    seed=SEEDS, position=st.integers(0, 1 << 33), vocab=st.integers(1, 70), k=st.integers(1, 8), data=st.integers(0, 99)
)
def test_kernel_torch_and_numpy_choose_the_same(seed: int, position: int, vocab: int, k: int, data: int) -> None:
    scores = random_logits(1, vocab, data).double()
    scores[torch.rand(scores.shape, generator=torch.Generator().manual_seed(data)) < 0.3] = -torch.inf
    scores[0, data % vocab] = 0.5  # one at least is allowed
    finite = int(scores.isfinite().sum())
    k = min(k, finite)
    rows = [row(seed, position)]
    values, tokens = perturbed_topk(scores, columns_of(rows), k)
    signed = torch.tensor([seed - (1 << 64) if seed >= 1 << 63 else seed])
    other_values, other_tokens = perturbed_topk_reference(scores, signed, torch.tensor([position]), k)
    plain = scores[0].numpy() + noise.gumbel(seed, position, vocab)
    assert tokens.tolist() == other_tokens.tolist() == [np.argsort(-plain, kind="stable")[:k].tolist()]
    torch.testing.assert_close(values, other_values, rtol=0, atol=1e-12)
    np.testing.assert_allclose(values[0], plain[tokens[0]], rtol=0, atol=1e-12)


@pytest.mark.parametrize("vocab", [3, 4, 1001, 8192])
@pytest.mark.parametrize("k", [1, 4])
def test_kernel_prunes_exactly(vocab: int, k: int) -> None:
    """Tokens that it does not hash could not have won: flat, peaked and one-sided rows."""
    flat, peaked = torch.zeros(40, vocab), random_logits(40, vocab) * 4
    ramp = torch.linspace(0, 60, vocab).expand(40, vocab)
    k = min(k, vocab)
    for scores in (flat, peaked, ramp, -ramp):
        rows = [row(seed, seed % 7) for seed in range(2**63 - 20, 2**63 + 20)]
        _, tokens = perturbed_topk(scores.double(), columns_of(rows), k)
        for i, r in enumerate(rows):
            plain = scores[i].double().numpy() + noise.gumbel(r.seed, r.position, vocab)
            assert tokens[i].tolist() == np.argsort(-plain, kind="stable")[:k].tolist()


def test_ties_go_to_the_lowest_id() -> None:
    """Equal noise is rare: tokens of one value at minus infinity from each other stand for it."""
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0]])
    assert sample(logits, sampling_of([row(0, temperature=0.0)])) == [1]
    for op in (perturbed_topk_reference, torch.ops.pilotfish.perturbed_topk):
        huge = torch.tensor([[0.0, 1e300, 1e300, 1e300]], dtype=torch.float64)  # the noise is below one ulp
        assert op(huge, torch.tensor([5]), torch.tensor([1]), 3)[1].tolist() == [[1, 2, 3]]
        for least in (0.0, 1e300):  # one infinite logit wins; with k = 1 the kernel prunes by the best logit
            infinite = torch.tensor([[least, 1e300, torch.inf, 1e300]], dtype=torch.float64)
            assert op(infinite, torch.tensor([5]), torch.tensor([1]), 1)[1].tolist() == [[2]]
        assert op(huge, torch.tensor([5]), torch.tensor([1]), 1)[1].tolist() == [[1]]


def test_the_kernel_refuses_what_does_not_fit() -> None:
    scores, one = torch.zeros(2, 4, dtype=torch.float64), torch.tensor([1])
    for arguments in ((scores, one, one), (scores.float(), one.repeat(2), one.repeat(2))):
        with pytest.raises(RuntimeError, match="perturbed_topk:"):
            torch.ops.pilotfish.perturbed_topk(*arguments, 1)


# -- filters


@pytest.mark.parametrize("params", FILTERS, ids=str)
@pytest.mark.parametrize("vocab", [5, 100])
def test_filters_are_the_plain_ones(params: dict[str, float], vocab: int) -> None:
    logits = random_logits(30, vocab)
    each = [SamplingParams(**params)] * 30  # type: ignore[arg-type]
    probs = filtered_by(logits, each).softmax(dim=-1).numpy()
    expected = np.array([reference_probs(r.numpy(), each[0]) for r in logits])
    assert ((probs > 0) == (expected > 0)).all()
    np.testing.assert_allclose(probs, expected, rtol=1e-9, atol=1e-15)


@given(
    seed=st.integers(0, 1000),
    vocab=st.integers(1, 90),
    steps=st.sampled_from([0.0, 0.5, 2.0]),  # logits rounded to multiples of it: ties
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    top_k=st.integers(0, 100),
    top_p=st.floats(0.01, 1.0),
    double=st.booleans(),
)
def test_the_filter_kernel_is_the_reference(
    seed: int, vocab: int, steps: float, min_p: float, top_k: int, top_p: float, double: bool
) -> None:
    logits = random_logits(3, vocab, seed).to(torch.float64 if double else torch.float32)
    logits = (logits / steps).round() * steps if steps else logits
    kinds = (torch.float64, torch.float64, torch.int64, torch.float64)
    values = (
        [1.0, 0.7, 1.0],
        [math.log(min_p) if min_p else -math.inf, -math.inf, -1.0],
        [top_k, 0, 2],
        [top_p, 0.6, 1],
    )
    columns = [torch.tensor(v, dtype=kind)[:, None] for v, kind in zip(values, kinds, strict=True)]
    kernel = torch.ops.pilotfish.filter_logits(logits, *columns)
    torch.testing.assert_close(
        kernel, filtered_reference(logits, *columns, Filters(True, max(top_k, 2), True)), rtol=0, atol=0
    )


def test_the_filter_kernel_drops_what_is_no_number() -> None:
    logits = torch.tensor([[1.0, math.nan, 3.0, math.nan]])
    kept = filtered_by(logits, [SamplingParams(min_p=0.01, top_k=3, top_p=0.9)]).isfinite()
    assert kept.tolist() == [[True, False, True, False]]


@pytest.mark.parametrize("params", FILTERS, ids=str)
def test_filters_are_those_of_transformers(params: dict[str, float]) -> None:
    p, logits = SamplingParams(**params), random_logits(30, 100)  # type: ignore[arg-type]
    expected = TemperatureLogitsWarper(float(p.temperature))(None, logits.double())
    expected = MinPLogitsWarper(p.min_p)(None, expected) if p.min_p > 0 else expected
    expected = TopKLogitsWarper(p.top_k)(None, expected) if p.top_k > 0 else expected
    expected = TopPLogitsWarper(p.top_p)(None, expected) if p.top_p < 1 else expected
    torch.testing.assert_close(filtered_by(logits, [p] * 30), expected, rtol=1e-12, atol=1e-12)


def test_a_row_gives_the_same_token_in_any_company() -> None:
    logits = random_logits(20, 200)
    rows = [row(i, i, **FILTERS[i % len(FILTERS)]) if i % 4 else row(i, temperature=0.0) for i in range(20)]
    together = sample(logits, sampling_of(rows))
    assert together == [sample(logits[i : i + 1], sampling_of([r]))[0] for i, r in enumerate(rows)]


@pytest.mark.parametrize("temperature", [0.0, 1e-3, 1e-9, 1e-300, 5e-324])
def test_a_temperature_of_zero_or_near_it_takes_the_arg_max(temperature: float) -> None:
    logits = random_logits(10, 50)
    rows = [row(i, temperature=temperature) for i in range(10)]
    assert sample(logits, sampling_of(rows)) == logits.argmax(dim=-1).tolist()
