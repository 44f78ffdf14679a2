"""Bias, penalties and exclusions on tensors: `core.logit_rules` says which, this applies them.

Everything is float64 and touches one row at a time, so a row does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pilotfish.core.executor import Sampling
from pilotfish.core.logit_rules import LogitEdits
from pilotfish.core.sampling_params import SamplingParams


def edited(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Logits [samples, vocab] after each row's rules, float64; or `logits` itself where no row has any. They may cover
    a part of the vocabulary (a draft's): ids beyond it are skipped."""
    present = [(row, edit) for row, edit in enumerate(sampling.edits) if edit is not None]
    if not present:
        return logits
    params = [sampling.params[sequence] for sequence in sampling.sequences.tolist()]
    scores = logits.to(torch.float64, copy=True)
    _keep_allowed(scores, present)
    _add_bias(scores, present)
    _penalize(scores, present, params)
    rows, tokens = _flat(scores, [(row, edit.excluded) for row, edit in present])
    scores[rows, tokens] = -torch.inf
    return scores


Present = Sequence[tuple[int, LogitEdits]]


def _keep_allowed(scores: torch.Tensor, present: Present) -> None:
    by_list: dict[int, list[tuple[int, NDArray[np.int64]]]] = {}  # rows of one request share the very array
    for row, edit in present:
        if edit.allowed is not None:
            by_list.setdefault(id(edit.allowed), []).append((row, edit.allowed))
    for places in by_list.values():
        rows, tokens = _flat(scores, places)
        kept = scores[rows, tokens]
        scores[[row for row, _ in places]] = -torch.inf
        scores[rows, tokens] = kept


def _add_bias(scores: torch.Tensor, present: Present) -> None:
    rows, tokens, biases = _flat(scores, [(row, e.biased) for row, e in present], [e.biases for _, e in present])
    scores[rows, tokens] += biases


def _penalize(scores: torch.Tensor, present: Present, params: Sequence[SamplingParams]) -> None:
    """Repetition, then frequency and presence (those two of tokens in the output only)."""
    places = [(row, edit.seen) for row, edit in present]
    repeated = [np.full(len(e.seen), params[row].repetition_penalty) for row, e in present]
    lowered = [
        e.counts * params[row].frequency_penalty + (e.counts > 0) * params[row].presence_penalty for row, e in present
    ]
    rows, tokens, factors, offsets = _flat(scores, places, repeated, lowered)
    before = scores[rows, tokens]
    scores[rows, tokens] = torch.where(before > 0, before / factors, before * factors) - offsets


def _flat(
    scores: torch.Tensor, places: Sequence[tuple[int, NDArray[np.int64]]], *columns: Sequence[NDArray[Any]]
) -> tuple[torch.Tensor, ...]:
    """Row and token of every place, and each column's values beside them, without tokens that `scores` lacks."""
    tokens = np.concatenate([ids for _, ids in places])
    rows = np.repeat([row for row, _ in places], [len(ids) for _, ids in places])
    inside = tokens < scores.shape[1]
    flat = (rows, tokens, *(np.concatenate(column) for column in columns))
    return tuple(torch.from_numpy(values[inside]).to(scores.device) for values in flat)
