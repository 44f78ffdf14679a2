"""Block drafters and Medusa in every publisher's layout, read and run, are what the formulas make of the tensors under
their published names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from block_heads import BlockFormulas, parallel_log_chances
from block_rig import Sequenced, executor_of, log_chances
from head_files import BLOCK_DIALECTS, write_block, write_medusa, write_target
from safetensors.torch import load_file
from torch import Tensor

from pilotfish.model.heads.files import read_head
from pilotfish.model.heads.spec import HeadFiles
from pilotfish.model.heads.target import TargetFacts

PATHS = [[5], [5, 2], [5, 2, 8], [1, 2, 3, 4], [3, 1, 4, 1, 5]]
#: What formulas call what publishers call otherwise.
RENAMED = {
    "markov_head.markov_": "markov.",
    "markov_head.gate_proj": "markov.gate",
    "confidence_head.proj": "confidence",
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetFacts:
    return write_target(tmp_path_factory.mktemp("target"))


def published(head: Path, files: HeadFiles, target: TargetFacts) -> HeadFiles:
    """The same head with its tensors as they lie in its file, and the target's where it has none."""
    own = {f"{name.removeprefix('model.')}": x for name, x in load_file(target.directory / "model.safetensors").items()}
    for name, x in load_file(head / "model.safetensors").items():
        for theirs, ours in RENAMED.items():
            name = name.replace(theirs, ours)
        own[name] = x
    d2t = own["d2t"] + torch.arange(len(own["d2t"])) if "d2t" in own else None
    return replace(files, tensors=own, d2t=d2t)


def assert_runs_as(expected: HeadFiles, files: HeadFiles, target: TargetFacts) -> None:
    executor = executor_of(files, vocab=target.vocab)
    sequence = Sequenced.random(13, range(100, 160), seed=1, hidden=target.hidden)
    told = torch.cat((log_chances(executor, [sequence.chunk()]), log_chances(executor, [sequence.nodes(PATHS)])))
    root, formulas = sequence.tokens[-1], BlockFormulas(expected)
    right = torch.stack([formulas.log_chances(sequence.known, root, path) for path in [[], *PATHS]])
    torch.testing.assert_close(told, right, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize(
    ("dialect", "fields"),
    [
        *((dialect, {}) for dialect in BLOCK_DIALECTS),
        ("speculators", {"draft_vocab": 200}),
        ("z-lab", {"gated": True, "confidence": "hidden"}),
        ("deepspec", {"gated": True}),
    ],
)
def test_dspark(dialect: str, fields: dict[str, Any], target: TargetFacts, tmp_path: Path) -> None:
    head = write_block(tmp_path, "dspark", dialect, target=target, **fields)
    files = read_head(head, target)
    assert_runs_as(published(head, files, target), files, target)


@pytest.mark.parametrize("dialect", [dialect for dialect in BLOCK_DIALECTS if dialect != "deepspec"])
def test_dflash(dialect: str, target: TargetFacts, tmp_path: Path) -> None:
    head = write_block(tmp_path, "dflash", dialect, target=target)
    files = read_head(head, target)
    assert_runs_as(published(head, files, target), files, target)


@pytest.mark.parametrize("dialect", ["medusa", "vllm"])
@pytest.mark.parametrize("draft_vocab", [0, 200])
def test_medusa(dialect: str, draft_vocab: int, target: TargetFacts, tmp_path: Path) -> None:
    """Its formulas read the tensors that `read_head` names."""
    files = read_head(write_medusa(tmp_path, dialect, target=target, blocks=2, draft_vocab=draft_vocab), target)
    executor = executor_of(files, vocab=target.vocab)
    sequence = Sequenced.random(7, range(50), seed=1, hidden=target.hidden)
    told = torch.cat((log_chances(executor, [sequence.chunk()]), log_chances(executor, [sequence.nodes(PATHS)])))
    right: list[Tensor] = [
        parallel_log_chances(files, sequence.known[-1], len(path) + 1, target.vocab) for path in [[], *PATHS]
    ]
    torch.testing.assert_close(told, torch.stack(right), atol=1e-4, rtol=0.0)
