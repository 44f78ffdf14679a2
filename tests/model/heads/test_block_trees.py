"""Trees of heads through the one grower: a node's children are those of the formulas, under the target's noise."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from block_heads import BlockFormulas, block_head, by_target, parallel_head, parallel_log_chances
from recurrent_formulas import VOCAB as RECURRENT_VOCAB
from recurrent_formulas import Formulas, random_head
from sizes import paired, sized
from support import limits
from torch import Tensor
from tree_rig import Told, grow

from pilotfish.model.heads.spec import HeadFiles


def block_told(files: HeadFiles, features: Tensor, tokens: list[int]) -> Told:
    formulas = BlockFormulas(files)
    root = tokens[-1]
    states = formulas.states(features, root)

    def told(path: list[int]) -> tuple[Tensor, Tensor] | None:
        known = formulas.logits(states, root, path)
        return None if known is None else (by_target(files, known[0]), known[1])

    return told


def parallel_told(files: HeadFiles, features: Tensor, _tokens: list[int]) -> Told:
    def told(path: list[int]) -> tuple[Tensor, Tensor] | None:
        known = parallel_log_chances(files, features[-1], len(path) + 1)
        return (known, torch.zeros(())) if known.isfinite().any() else None

    return told


def recurrent_told(files: HeadFiles, features: Tensor, tokens: list[int]) -> Told:
    def told(path: list[int]) -> tuple[Tensor, Tensor]:
        logits = Formulas(files).drafted(features, tokens, path)[-1]
        return by_target(files, logits, RECURRENT_VOCAB), torch.zeros(())

    return told


HEADS = {
    "dflash": (block_head("dflash"), block_told),
    "dspark": (block_head("dspark"), block_told),
    "gated": (block_head("dspark_gated"), block_told),
    "reduced": (block_head("dspark_window"), block_told),
    "medusa": (parallel_head(), parallel_told),
}


@pytest.mark.parametrize("temperature", sized([0.8], [0.0, 0.8]))
@pytest.mark.parametrize("kind", sized(("dspark", "reduced", "medusa"), tuple(HEADS)))
def test_trees(kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    files, formulas = HEADS[kind]
    head = files.spec.head
    deepest = head.heads if kind == "medusa" else head.block - head.first
    grow(files, partial(formulas, files), deepest, temperature, monkeypatch)


@pytest.mark.parametrize(("kind", "draft_vocab"), paired(["eagle3", "eagle3.1", "mtp deepseek"], [RECURRENT_VOCAB, 40]))
def test_trees_of_states(kind: str, draft_vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    files = random_head(kind, draft_vocab=draft_vocab)
    grow(files, partial(recurrent_told, files), 3, 0.8, monkeypatch, limits(nodes=24, levels=3))
