"""Trees that a recurrent head grows in the target's process: the formulas' own tokens and chances at every node."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from recurrent_formulas import HIDDEN, VOCAB, Formulas, random_head
from recurrent_rig import SLOTS, executor_of
from sizes import paired
from support import limits, paths_of, proposed

from pilotfish.core.cache.slots import SlotPool, Slots
from pilotfish.core.features.features import Features
from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.request import Request
from pilotfish.workers.lm import LMDrafter

CHILDREN = 3
LIMITS = limits(nodes=24, levels=3)
#: Two sequences that begin alike, and one of another length.
PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 9, 40], [30, 31, 32])


def features_of(tokens: Sequence[int]) -> Features:
    """[tokens, HIDDEN], a function of all tokens up to each."""
    seeds = [zlib.crc32(bytes(tokens[: place + 1])) for place in range(len(tokens))]
    return np.array([np.random.default_rng(seed).normal(size=HIDDEN) for seed in seeds], np.float32)


class Target:
    feature_width = HIDDEN

    def __init__(self) -> None:
        self.pool = SlotPool(SLOTS)
        self.plane = np.full((SLOTS, HIDDEN), np.nan, np.float32)

    def features(self, slots: Slots) -> Features:
        return self.plane[slots]

    def compute(self, request: Request) -> None:
        """All tokens but the last."""
        first, end = request.num_computed, len(request.tokens) - 1
        slots = self.pool.allocate(end - first)
        request.add_slots(slots)
        self.plane[slots] = features_of(request.tokens[:end])[first:]


@pytest.mark.parametrize(("kind", "draft_vocab"), paired(["eagle3", "eagle3.1", "mtp deepseek"], [VOCAB, 40]))
def test_every_node_has_the_formulas_token_and_chance(kind: str, draft_vocab: int) -> None:
    files, target = random_head(kind, draft_vocab=draft_vocab), Target()
    drafter = LMDrafter(executor_of(files, eager=False), 4, CHILDREN, source=target)
    params = SamplingParams(temperature=0.0, max_tokens=60)
    requests = [Request(i, tokens, params, 1, frozenset(), 200) for i, tokens in enumerate(PROMPTS)]
    for accepted in (1, 3, 0):  # the first commit begins to calibrate scores
        for request in requests:
            target.compute(request)
        for request, tree in zip(requests, proposed(drafter, requests, LIMITS), strict=True):
            paths = paths_of(tree)
            assert max(map(len, paths)) == 3
            check(Formulas(files), request, paths, scored=accepted == 1)
            deepest = max(paths, key=len)
            drafter.commit(request, request.extend([*deepest[:accepted], 100]))


def check(formulas: Formulas, request: Request, paths: dict[tuple[int, ...], float], *, scored: bool) -> None:
    features = torch.from_numpy(features_of(request.tokens[:-1]))
    ids = formulas.files.d2t
    for path, score in paths.items():
        after = formulas.drafted(features, request.tokens, path[:-1])[: len(path)].log_softmax(dim=1)
        columns = list(path) if ids is None else torch.searchsorted(ids, torch.tensor(path)).tolist()
        assert ids is None or ids[columns].tolist() == list(path)
        chances = [float(row[column]) for row, column in zip(after, columns, strict=True)]
        assert not scored or score == pytest.approx(sum(chances), abs=1e-3)
        assert int((after[-1] > chances[-1] + 1e-4).sum()) < CHILDREN
