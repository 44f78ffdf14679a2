"""The Triton kernels that draw, against the reference, on the device or in Triton's interpreter."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, Mock

import msgspec
import numpy as np
import pytest
import torch
from recording import RecordingKernels
from support import RowSampling, columns_of
from triton_launches import LAUNCHED

pytest.importorskip("triton")

from pilotfish.core.sampling.logit_rules import LogitRules
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import NO_NODES, NodeRows, Sampling, SequenceRows, TokenMasks
from pilotfish.core.trees.tree import NO_TOKEN
from pilotfish.engine.trial import _tried
from pilotfish.model.batch import Buckets
from pilotfish.model.cuda import drawing
from pilotfish.model.cuda.drawing import drawn_at_once, noisy_best
from pilotfish.model.draws import Draws
from pilotfish.model.executor import TorchExecutor
from pilotfish.model.loading.loader import load_model
from pilotfish.model.sampling import SampleColumns, filtered_reference, perturbed_topk_reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SEEDS, POSITIONS = (0, 7, 2**64 - 1, 2**53 + 1), (0, 1, 2**33 + 5, 4095)
FREE: dict[str, Any] = {"temperature": 1.0}
#: Of each row. A filter that keeps all stands beside those that do not.
FILTERS: dict[str, Sequence[dict[str, Any]]] = {
    "none": [FREE] * 4,
    "min-p": [{"min_p": 0.1}, FREE, {"min_p": 0.9, "temperature": 2.0}, {"min_p": 0.01, "temperature": 0.1}],
    "top-k": [{"top_k": 1}, {"top_k": 3, "temperature": 0.3}, FREE, {"top_k": 4000}],
    "top-p": [{"top_p": 0.9}, {"top_p": 1e-6}, FREE, {"top_p": 0.999, "temperature": 0.5}],
    "all": [
        {"min_p": 0.05, "top_k": 20, "top_p": 0.8},
        {"top_k": 50, "top_p": 0.5},
        {"min_p": 0.02, "top_p": 0.9},
        FREE,
    ],
}


def columns(filters: Sequence[dict[str, Any]] = FILTERS["none"]) -> SampleColumns:
    params = [SamplingParams(**{**FREE, **each}) for each in filters]
    found = columns_of([RowSampling(*row) for row in zip(params, SEEDS, POSITIONS, strict=True)])
    return of_rows(found, slice(None))


def of_rows(every: SampleColumns, part: slice) -> SampleColumns:
    values = {f.name: getattr(every, f.name) for f in fields(every)}
    return replace(every, **{name: x[part].to(DEVICE) for name, x in values.items() if torch.is_tensor(x)})


def random_logits(width: int, dtype: torch.dtype = torch.float64, dropped: float = 0.0) -> torch.Tensor:
    """Of few values, so that many are equal, zeros of both signs among them."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(len(SEEDS), width, generator=generator) * 12).round() / 4
    return drawn.masked_fill(torch.rand(drawn.shape, generator=generator) < dropped, -torch.inf).to(DEVICE, dtype)


def reference(logits: torch.Tensor, given: SampleColumns, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    sorts = given.temperatures, given.floors, given.top_k, given.top_p, given.filters
    return perturbed_topk_reference(filtered_reference(logits, *sorts), given.seeds, given.positions, k)


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize(
    ("width", "k", "dtype", "dropped"),
    [
        (5, 1, torch.float64, 0.7),
        (37, 4, torch.bfloat16, 0.0),
        (5003, 1, torch.float64, 0.0),
        (5003, 2, torch.float32, 0.7),
    ],
)
def test_the_best_are_those_of_the_reference(
    filters: str, width: int, k: int, dtype: torch.dtype, dropped: float
) -> None:
    """A row of five has none at all that may be drawn."""
    logits, given = random_logits(width, dtype, dropped), columns(FILTERS[filters])
    values, chosen = noisy_best(logits, given, k)
    expected, places = reference(logits, given, k)
    kept = expected > -torch.inf
    assert kept.any(dim=1).sum() >= 3 and torch.equal(values > -torch.inf, kept)
    assert torch.equal(chosen[kept], places[kept])
    torch.testing.assert_close(values[kept], expected[kept], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("filters", FILTERS)
def test_filters_keep_what_the_reference_keeps(filters: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it drawn, one after another; equals lie in several blocks."""
    monkeypatch.setattr(drawing, "BLOCK", 16)
    logits, given = random_logits(40, torch.float32), columns(FILTERS[filters])
    values, chosen = noisy_best(logits, given, 40)
    expected, places = reference(logits, given, 40)
    for row in range(len(SEEDS)):
        kept = int((expected[row] > -torch.inf).sum())
        assert int((values[row] > -torch.inf).sum()) == kept
        assert torch.equal(chosen[row, :kept], places[row, :kept])


def test_columns_may_be_tokens_of_a_reduced_vocabulary() -> None:
    ids, logits, given = torch.arange(0, 3 * 400, 3, device=DEVICE), random_logits(400), columns()
    both = noisy_best(logits, given, 3, ids), perturbed_topk_reference(logits, given.seeds, given.positions, 3, ids)
    for got, expected in zip(*both, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)


def test_of_equals_the_first_is_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """All noise is of one token."""
    monkeypatch.setattr(drawing, "BLOCK", 64)
    ids, logits = torch.zeros(300, dtype=torch.int64, device=DEVICE), torch.zeros(len(SEEDS), 300, device=DEVICE)
    logits[:, 70] = logits[:, 280] = 1.0
    _, chosen = noisy_best(logits, columns(), 4, ids)
    assert chosen.tolist() == [[70, 280, 0, 1]] * len(SEEDS)


def test_a_row_does_not_depend_on_the_others() -> None:
    logits, given = random_logits(3000, torch.float32), columns(FILTERS["all"])
    values, chosen = noisy_best(logits, given, 2)
    for row in range(len(SEEDS)):
        one = slice(row, row + 1)
        alone = noisy_best(logits[one], of_rows(given, one), 2)
        assert torch.equal(alone[0], values[one]) and torch.equal(alone[1], chosen[one])
    assert noisy_best(logits[:0], of_rows(given, slice(0)), 2)[1].shape == (0, 2)


# -- in a recorded forward


class DrawingKernels(RecordingKernels):
    sizes = Buckets(rows=(4, 16), prefix=(64,), path=(8,))

    def draw(self, logits: torch.Tensor, draws: Draws, ids: torch.Tensor | None = None) -> torch.Tensor:
        return drawn_at_once(logits, draws, ids)


def test_a_trial_launches_all(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = set[str]()
    for name in LAUNCHED[drawing]:
        noted = Mock(side_effect=lambda _, name=name: launched.add(name) or Mock())
        monkeypatch.setattr(drawing, name, MagicMock(__getitem__=noted))
    here = load_model(llama, torch.float32, DEVICE, eager=DEVICE.type == "cpu")
    _tried(TorchExecutor(replace(here, kernels=DrawingKernels(DEVICE), recordable=True), 100), lambda _: None)
    assert launched == {*LAUNCHED[drawing]}


def chain_rows(first: int, nodes: int, start: int = 0) -> SequenceRows:
    """Nine tokens and a chain below them, at slots of their own."""
    slots = np.arange(first, first + 9 + nodes, dtype=np.int32)
    chain = NodeRows(np.arange(nodes), np.arange(1, nodes + 1), np.tile(slots[9:], (nodes, 1))) if nodes else NO_NODES
    return SequenceRows(start, slots[start:9].tolist(), slots[:9], chain, kept=[8 - start])


def masks_of(bits: Sequence[int], samples: Sequence[int]) -> TokenMasks:
    """The same for each of `samples`: tokens 0 to 31, the others never."""
    words = np.array([bits], np.uint32).view(np.int32).repeat(len(samples), axis=0)
    return TokenMasks(np.array(samples), lambda: lambda: words)


PENALTIES: dict[str, Any] = {"repetition_penalty": 1.7, "presence_penalty": 0.4, "frequency_penalty": 0.3}
#: What the first sequence's three samples and the second's one have; the kinds of forwards that are recorded for all.
RECORDED: dict[str, tuple[list[dict[str, Any]], dict[str, Any], int]] = {
    "parameters": ([FREE, {"temperature": 0.7, "top_p": 0.5, "top_k": 9}, {"temperature": 0.0, "top_k": 2}], {}, 2),
    "rules": (
        [
            {"logit_bias": {3: 90.0, 9999: 1.0}},
            {"logit_bias": {3: 2.0, 5: -3.0}, **PENALTIES, "bad_token_ids": [3, 3, 7]},
            {"temperature": 0.0, **PENALTIES},
            {"allowed_token_ids": [4, 8, 200, 249]},
            {"allowed_token_ids": [4, 8], "bad_token_ids": [8], **PENALTIES},
        ],
        {},
        6,
    ),
    "masks": (
        [FREE, {"temperature": 0.0}, {"allowed_token_ids": [3, 6, 100], **PENALTIES}],
        {"masks": masks_of([0b1011001], [0, 2])},
        3,
    ),
    "none is left": ([FREE, {"temperature": 0.0}], {"masks": masks_of([0], [1])}, 2),
    "rows of several samples": ([FREE, {"temperature": 0.0, **PENALTIES}], {"rows": np.array([0, 1, 1, 3])}, 3),
}


@pytest.mark.parametrize("kind", RECORDED)
@pytest.mark.parametrize("children", [0, 3])
def test_a_recorded_forward_draws_by_itself(children: int, kind: str, llama: Path) -> None:
    """Or right after it, once masks are there; anew where a row is not finite."""
    here = load_model(llama, torch.float32, DEVICE, eager=DEVICE.type == "cpu")
    models = replace(here, recordable=False), here
    if DEVICE.type == "cpu":
        models = here, replace(here, kernels=DrawingKernels(DEVICE), recordable=True)
    plain, recorded = (TorchExecutor(model, 100, vocab_size=250) for model in models)
    rows = [chain_rows(10, 2), chain_rows(40, 0, start=5)]
    each, fields, recordings = RECORDED[kind]
    for params in each:
        mixed = SamplingParams(**{**FREE, **params}), SamplingParams(temperature=1.0)
        rules = LogitRules.of(mixed[0], [*range(3, 700, 2), 11, 12], frozenset())
        edits = () if rules is None else [*(rules.edits(path) for path in ([], [3], [3, 4] * 9)), None]
        owners, positions = np.array([0, 0, 0, 1]), np.array([9, 10, 11, 9])
        given = Sampling(fields.get("rows"), mixed, (5, 6), owners, positions, edits, children=children)
        sampling = msgspec.structs.replace(given, masks=fields.get("masks"))
        for broken in ([], [3]):
            for executor in (plain, recorded):
                executor.kv[0].keys[41] = torch.nan if broken else 0.0
            expected, got = (executor.execute(rows, sampling) for executor in (plain, recorded))
            assert list(got.broken) == list(expected.broken) == broken
            possible: Any = expected.tokens >= 0
            if children:
                possible = expected.log_chances > -np.inf  # type: ignore[operator]
                assert np.array_equal(got.log_chances > -np.inf, possible)  # type: ignore[operator]
                close = np.isclose(got.log_chances, expected.log_chances, atol=1e-6)  # type: ignore[arg-type]
                assert (close | ~possible).all()
            assert np.array_equal(
                np.where(possible, got.tokens, NO_TOKEN), np.where(possible, expected.tokens, NO_TOKEN)
            )
            assert got.logprobs([0], [7], 2) == expected.logprobs([0], [7], 2)
    if isinstance(kernels := recorded.model.kernels, DrawingKernels):
        assert kernels.recordings == recordings
