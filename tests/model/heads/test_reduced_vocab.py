"""Heads that give some tokens only: the noise, masks and rules are those of the target's ids."""

import operator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recording import RecordingKernels
from recurrent_formulas import VOCAB, Drafted, executor_of, free_slots, logits, random_head

from pilotfish.core.sampling.logit_rules import LogitEdits
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import Outcome, Sampling, TokenMasks
from pilotfish.model.cpu.native import load_kernels
from pilotfish.model.heads.executor import HeadSetup
from pilotfish.model.sampling import likely_tokens, perturbed_topk_reference

#: Of two prompts.
LENGTHS = (9, 14)
SEED = 0x9E3779B97F4A7C15


@pytest.fixture(params=["drawn after it", "drawn by it"], autouse=True)
def forward(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "drawn by it":
        kernels = RecordingKernels()
        monkeypatch.setattr(HeadSetup, "kernels", lambda *_: kernels)


def sampling(params: SamplingParams, children: int = 6, **options: Any) -> Sampling:
    """After the last token of each prompt."""
    places = np.arange(len(LENGTHS))
    return Sampling(None, [params] * 2, [SEED, 7], places, np.array(LENGTHS), children=children, **options)


def drawn(draft_vocab: int, rules: Sampling, vocab_size: int | None = None) -> tuple[Outcome, torch.Tensor]:
    """What a head gives, and its raw logits over all tokens, -inf where it has none."""
    files = random_head("eagle3", draft_vocab=draft_vocab)
    executor, free = executor_of(files, eager=False, vocab_size=vocab_size), free_slots()
    rows = [Drafted.random(length, free).chunk() for length in LENGTHS]
    assert executor.vocab_size == VOCAB
    everything = torch.full((len(LENGTHS), VOCAB), -torch.inf)
    assert files.d2t is not None
    listed = files.d2t[files.d2t < (vocab_size or VOCAB)].sort().values
    everything[:, listed] = logits(executor, *rows)
    return executor.execute(rows, rules), everything


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.7, "top_p": 0.6}])
def test_tokens_and_chances_are_those_of_all_tokens_without_the_missing(fields: dict[str, Any]) -> None:
    outcome, everything = drawn(50, sampling(SamplingParams(**fields)))
    tokens, chances = likely_tokens(everything, sampling(SamplingParams(**fields)))
    assert outcome.log_chances is not None
    possible = chances > -np.inf  # below them come any
    assert np.array_equal(outcome.tokens[possible], tokens[possible])
    np.testing.assert_allclose(outcome.log_chances, chances, rtol=0, atol=1e-6)


def test_seconds_are_the_devices() -> None:
    executor, moments, waited = executor_of(random_head("eagle3"), eager=True), iter((1.0, 3.5)), list[float]()
    kernels: Any = SimpleNamespace(moment=lambda: next(moments), seconds=operator.sub, wait=waited.append)
    executor._kernels = kernels
    rows = [Drafted.random(length, free_slots(length)).chunk() for length in LENGTHS]
    seconds = executor.execute(rows, sampling(SamplingParams())).seconds
    assert (seconds.model, seconds.sample, waited) == (2.5, 0.0, [3.5])


def test_masks_and_rules_name_the_targets_ids() -> None:
    _, everything = drawn(50, sampling(SamplingParams()))
    best, second, third, *_ = everything[0].argsort(descending=True).tolist()
    bits = np.full((1, VOCAB // 32), 0xFFFFFFFF, np.uint32)
    bits[0, best // 32] ^= np.uint32(1 << best % 32)
    masks = TokenMasks(np.array([0]), lambda: lambda: bits.view(np.int32))
    params, none = SamplingParams(temperature=0.0), np.zeros(0, np.int64)
    outcome, _ = drawn(50, sampling(params, masks=masks))
    assert outcome.tokens[0, :2].tolist() == [second, third]
    without = LogitEdits(None, none, np.zeros(0), None, (), excluded=np.array([best, second]))
    outcome, _ = drawn(50, sampling(params, edits=[without, None]))
    assert outcome.tokens[0, 0] == third


def test_tokens_that_the_target_lacks_are_never_given() -> None:
    outcome, _ = drawn(VOCAB - 1, sampling(SamplingParams(temperature=2.0), children=40), vocab_size=30)
    assert outcome.log_chances is not None
    assert outcome.tokens[outcome.log_chances > -np.inf].max() < 30


def test_the_kernel_and_its_reference_give_the_same_columns() -> None:
    assert load_kernels()
    generator = torch.Generator().manual_seed(0)
    for count in (1, 7, 64, 1900, 2047):
        ids = torch.randperm(2047, generator=generator)[:count].sort().values
        scores = 3 * torch.randn(5, count, dtype=torch.float64, generator=generator)
        scores[0, ::2] = -torch.inf
        seeds, positions = torch.randint(-(2**62), 2**62, (2, 5), generator=generator)
        for k in (1, min(4, count)):
            expected = perturbed_topk_reference(scores, seeds, positions, k, ids)
            found = torch.ops.pilotfish.perturbed_topk(scores, seeds, positions, k, ids)
            finite = expected[0] > -torch.inf
            assert torch.equal(found[1][finite], expected[1][finite])
            torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-12)
