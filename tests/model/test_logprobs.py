"""Log-probabilities of tokens: the kernel, its reference and plain NumPy tell the same."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from pilotfish.core.scheduling.executor import TokenLogprobs
from pilotfish.model.logprobs import token_logprobs, token_logprobs_reference

pytestmark = pytest.mark.usefixtures("kernels")

Scores = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], tuple[torch.Tensor, ...]]


@pytest.fixture(params=["kernel", "reference"])
def scores(request: pytest.FixtureRequest, kernels: None) -> Scores:  # noqa: ARG001  # loads them
    return torch.ops.pilotfish.token_logprobs if request.param == "kernel" else token_logprobs_reference


def random_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def all_rows(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = torch.arange(len(logits))
    return logits, rows, rows * 7 % logits.shape[1]


def plain(logits: torch.Tensor, token: int, top: int) -> tuple[Any, ...]:
    """Of a row: log-probability, rank, the likeliest, theirs."""
    row = logits.double().numpy()
    with np.errstate(invalid="ignore"):  # infinity less itself
        shifted = row - np.nanmax(np.append(row, -np.inf))
        log_probs = shifted - np.log(np.exp(shifted).sum())
    likely = np.argsort(-np.nan_to_num(row, nan=-np.inf, posinf=np.inf, neginf=-np.inf), kind="stable")[:top]
    return log_probs[token], int((row > row[token]).sum()) + 1, likely.tolist(), log_probs[likely]


@given(
    vocab=st.integers(1, 200),
    top=st.integers(0, 25),
    steps=st.sampled_from([0.0, 0.5, 4.0]),  # logits rounded to multiples of it: ties
    odd=st.sampled_from([(), (-torch.inf,), (torch.nan,), (torch.inf,), (-torch.inf, torch.nan)]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_the_kernel_is_the_reference(
    vocab: int, top: int, steps: float, odd: tuple[float, ...], dtype: torch.dtype, seed: int
) -> None:
    logits = random_logits(3, vocab, seed).to(dtype)
    logits = (logits / steps).round() * steps if steps else logits
    for place, value in enumerate(odd):
        logits[place, torch.rand(vocab, generator=torch.Generator().manual_seed(seed + place)) < 0.3] = value
    top, (logits, rows, tokens) = min(top, vocab), all_rows(logits)
    reference = token_logprobs_reference(logits, rows, tokens, top)
    wide = logits if dtype == torch.float64 else logits.float()
    kernel = torch.ops.pilotfish.token_logprobs(wide, rows, tokens, top)
    for each in (kernel, reference):
        for row, (logprob, rank, likely, likely_logprobs) in enumerate(zip(*each, strict=True)):
            want = plain(logits[row], int(tokens[row]), top)
            assert (int(rank), likely.tolist()) == want[1:3]
            np.testing.assert_allclose(logprob, want[0], rtol=0, atol=1e-12)
            np.testing.assert_allclose(likely_logprobs, want[3], rtol=0, atol=1e-12)


@pytest.mark.parametrize("values", [np.zeros(1000), np.arange(1000.0), -np.arange(1000.0), np.arange(1000) % 7.0])
def test_whatever_the_order_of_the_logits(scores: Scores, values: np.ndarray) -> None:
    logits = torch.from_numpy(values)[None]
    logprobs, ranks, likely, likely_logprobs = scores(logits, torch.tensor([0]), torch.tensor([500]), 20)
    want = plain(logits[0], 500, 20)
    assert (ranks.tolist(), likely.tolist()) == ([want[1]], [want[2]])
    np.testing.assert_allclose([*logprobs, *likely_logprobs[0]], [want[0], *want[3]], rtol=0, atol=1e-12)


def test_a_rows_bits_do_not_depend_on_its_company(scores: Scores, threads: int) -> None:  # noqa: ARG001
    logits, rows, tokens = all_rows(random_logits(40, 5003))
    together = scores(logits, rows, tokens, 5)
    for row in range(40):
        alone = scores(logits[row : row + 1].clone(), torch.tensor([0]), tokens[row : row + 1], 5)
        assert all(torch.equal(one[0], all_of[row]) for one, all_of in zip(alone, together, strict=True))


def test_rows_may_be_some_in_any_order(scores: Scores) -> None:
    logits, rows, tokens = all_rows(random_logits(40, 50))
    together, some = scores(logits, rows, tokens, 3), torch.tensor([31, 4, 4, 0])
    for got, want in zip(scores(logits, some, tokens[some], 3), together, strict=True):
        assert torch.equal(got, want[some])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_as_records(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [5.0, -1.0, 0.0, 1.0]], dtype=dtype)
    first, second = token_logprobs(logits, [0, 1], [2, 0], 3)
    want = logits.double().log_softmax(-1)
    assert (first.token, first.rank, second.rank) == (2, 3, 1)
    assert [token for token, _ in first.top] == [1, 3, 2]  # ties by id
    assert [token for token, _ in second.top] == [0, 3, 2]
    assert first.logprob == pytest.approx(want[0, 2].item(), abs=1e-12)
    assert dict(second.top)[3] == pytest.approx(want[1, 3].item(), abs=1e-12)
    assert token_logprobs(logits, [1], [1], 0) == [TokenLogprobs(1, second.logprob - 6.0, 4, ())]
    assert len(token_logprobs(logits, [1], [1], 20)[0].top) == 4
    assert token_logprobs(logits, [], [], 3) == []


class Ops(TorchDispatchMode):
    """Notes the widest input of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        widths = [tensor.shape[-1] for tensor in args if isinstance(tensor, torch.Tensor) and tensor.dim()]
        self.widths[name] = max(self.widths.get(name, 0), *widths, 0)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)  # with kernels and without
def test_no_vocabulary_is_sorted(dtype: torch.dtype) -> None:
    logits = random_logits(2, 500).to(dtype)
    with Ops() as for_none:
        token_logprobs(logits, [0, 1], [3, 4], 0)
    assert "sort" not in for_none.widths and "topk" not in for_none.widths
    with Ops() as for_some:
        token_logprobs(logits, [0, 1], [3, 4], 5)
    assert for_some.widths.get("sort", 0) <= 5


def test_the_kernel_refuses_what_does_not_fit() -> None:
    logits, one = torch.zeros(2, 4), torch.tensor([1])
    wrong = [
        (logits.half(), one, one, 1),
        (logits.T, one, one, 1),
        (logits, one, one.repeat(2), 1),
        (logits, one.int(), one, 1),
        (logits, one, one, 5),
        (logits, one + 1, one, 1),
        (logits, one, one - 2, 1),
    ]
    for arguments in wrong:
        with pytest.raises(RuntimeError, match="token_logprobs:"):
            torch.ops.pilotfish.token_logprobs(*arguments)
