"""Kernels that record and draw as CUDA's do, in torch on the CPU. The recorder only remembers the call; as in CUDA, a
replay reads and writes the memory of the first one."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from pilotfish.core.trees.tree import NO_TOKEN
from pilotfish.engine import engine, trial
from pilotfish.model.batch import GRAPHS, Buckets
from pilotfish.model.cuda.graphs import GraphCache
from pilotfish.model.draws import Draws
from pilotfish.model.kernels import Draw, Forward, Kernels
from pilotfish.model.sampling import NOISE_SCALE, PERTURBED, SampleColumns, perturbed


def as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines and workers try what they make; a ZeroDivisionError says that a kernel does not run."""
    for module in (trial, engine):
        monkeypatch.setattr(module, "device_of", lambda _: torch.device("cuda"))
    monkeypatch.setattr(trial, "kernels_of", lambda *_, **__: SimpleNamespace(failures=(ZeroDivisionError,)))
    monkeypatch.setitem(PERTURBED, "cuda", PERTURBED.get("cuda", perturbed))


class RecordingKernels(Kernels):
    records = True
    sizes = GRAPHS

    def __init__(self, device: torch.device = torch.device("cpu")) -> None:  # noqa: B008
        super().__init__(device)
        self.recordings = 0

    def buckets(self) -> Buckets:
        return self.sizes

    def recorded(self, forward: Forward, draw: Draw) -> Forward:
        return GraphCache(forward, draw, self._record, self.device, self.moment)

    def _record(self, call: Callable[[], None]) -> Callable[[], None]:
        self.recordings += 1
        return call

    def draw(self, logits: Tensor, draws: Draws, ids: Tensor | None = None) -> Tensor:
        columns, scores = SampleColumns.over(draws.table, draws.filters), edited(logits, draws)
        k = min(max(draws.children, 1), logits.shape[1])
        values, best = perturbed(scores, columns, k, ids)
        chances = (values / NOISE_SCALE).log_softmax(dim=-1)
        likely, likeliest = scores.log_softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        greedy = columns.greedy[:, None] != 0
        best = torch.where(greedy, likeliest[:, :k], best)
        best = best if ids is None else ids[best]
        if not draws.children:
            best = torch.where(values.isnan() | (values == -torch.inf), NO_TOKEN, best)
        finite = logits.isfinite().all(dim=-1, keepdim=True)
        if draws.rows is not None:
            finite = finite.all().expand(draws.samples, 1)
        chances = torch.where(greedy, likely[:, :k], chances)
        return torch.cat((best, chances.view(torch.int64), finite.long()), dim=1)


def edited(logits: Tensor, draws: Draws) -> Tensor:
    scores = logits if draws.rows is None else logits.index_select(0, draws.rows)
    return scores.double() if draws.rules is None else draws.rules.applied(scores, draws.table)
