"""Trees of block drafters and Medusa through the one grower: a node's children are those of its slot, or its depth's
head, under the target's noise."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from block_heads import BlockFormulas, block_head, by_target, parallel_head, parallel_log_chances
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


HEADS = {
    "dflash": (block_head("dflash"), block_told),
    "dspark": (block_head("dspark"), block_told),
    "gated": (block_head("dspark_gated"), block_told),
    "reduced": (block_head("dspark_window"), block_told),
    "medusa": (parallel_head(), parallel_told),
}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", HEADS)
def test_trees(kind: str, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    files, formulas = HEADS[kind]
    head = files.spec.head
    deepest = head.heads if kind == "medusa" else head.block - (0 if head.anchored else 1)
    grow(files, partial(formulas, files), deepest, temperature, monkeypatch)
