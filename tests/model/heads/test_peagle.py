"""P-EAGLE's heads, read from files of both layouts: what they give is what its authors' formulas give, and what
contradicts itself is refused by name."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from head_files import MASK, PEAGLE_DIALECTS, change_config, change_tensors, write_peagle
from msgspec import structs
from recurrent_formulas import Drafted, Formulas, executor_of, free_slots, logits
from torch import Tensor

from pilotfish.core.scheduling.executor import SequenceRows
from pilotfish.model.heads.executor import HeadExecutor
from pilotfish.model.heads.families.masked import CHAINS, MaskedExecutor, MaskedHead
from pilotfish.model.heads.files import read_head, read_spec
from pilotfish.model.heads.spec import FINAL, HeadFiles
from pilotfish.model.heads.target import TargetFacts
from pilotfish.model.heads.weights import is_head

TOKENS = 4
#: Nodes at every depth below a root, the last of which has no children.
PATHS = [(3,), (9,), (3, 4), (3, 4, 77), (3, 4, 77, 5)]
KINDS: dict[str, dict[str, Any]] = {
    "speculators": {"draft_vocab": 100},
    "normed": {"norm_before_residual": True, "norm_before_fc": True, "depth": 3},
    "vllm": {"dialect": "vllm", "fc_norm": True, "depth": 2},
    "windowed": {"dialect": "vllm", "layer_types": ["sliding_attention"], "sliding_window": 6, "rope_theta": 5e5},
    "final state": {"dialect": "vllm", "layers": (FINAL,), "eagle_config": {"use_aux_hidden_state": False}},
}


@pytest.fixture(scope="module")
def heads(target: TargetFacts, tmp_path_factory: pytest.TempPathFactory) -> dict[str, HeadFiles]:
    root, read = tmp_path_factory.mktemp("heads"), {}
    for kind, about in KINDS.items():
        head = write_peagle(root / kind, target=target, tokens=TOKENS, **about)
        if kind == "final state":
            change_config(head, eagle_aux_hidden_state_layer_ids=None)
            change_tensors(head, {"fc.weight": None})
        read[kind] = read_head(head, target)
    return read


# -- by the formulas


@dataclass(frozen=True)
class PeagleFormulas:
    files: HeadFiles

    @property
    def head(self) -> MaskedHead:
        assert isinstance(self.files.spec.head, MaskedHead)
        return self.files.spec.head

    def mask(self) -> Tensor:
        """[1, hidden]"""
        tensors, projection = self.files.tensors, self.head.projection
        parts = tensors["mask_hidden"].double().view(len(projection.layers), -1)
        if projection.joined_norm:
            parts = normed(parts.view(1, -1), tensors["input_norm.weight"], projection.eps).view_as(parts)
        if projection.part_norms:
            rows = [normed(x, tensors[f"fc_norm.{i}.weight"], projection.eps) for i, x in enumerate(parts)]
            parts = torch.stack(rows)
        joined = parts.reshape(1, -1)
        return joined @ tensors["fc.weight"].double().T if projection.fc else joined

    def levels(self, features: Tensor, tokens: Sequence[int]) -> Tensor:
        """Logits of what comes 1, 2, … below the last token. [depth, draft vocab]"""
        masks = self.head.depth - 1
        states = torch.cat([features.double(), self.mask().repeat(masks, 1)])
        return Formulas(self.files).step(states, [*tokens[1:], *[self.head.mask_token] * masks])[1][-masks - 1 :]


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight.double() * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def assert_as_formulas(executor: HeadExecutor, files: HeadFiles, sequence: Drafted, chunk: SequenceRows) -> None:
    levels = PeagleFormulas(files).levels(sequence.known, sequence.tokens)
    expected = torch.cat([levels, torch.full_like(levels[:1], torch.nan)])
    found = torch.cat([logits(executor, chunk), logits(executor, sequence.level(PATHS))])
    wanted = expected[[0, *(len(path) for path in PATHS)]]
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_formulas(kind: str, eager: bool, heads: dict[str, HeadFiles]) -> None:
    files = heads[kind]
    executor, sequence = executor_of(files, eager=eager, vocab_size=512), Drafted.random(17, free_slots())
    for end in (1, 2, 9):
        logits(executor, sequence.chunk(end))
    for _ in range(2):
        assert_as_formulas(executor, files, sequence, sequence.chunk())
        sequence.commit([3, 4, 100])


def test_a_row_has_the_same_bits_in_any_company(eager: bool, heads: dict[str, HeadFiles]) -> None:
    files, free, count = heads["vllm"], free_slots(), CHAINS + 2
    sequences = [Drafted.random(2 + i % 7, free, seed=i) for i in range(count)]
    chunks = [sequence.chunk() for sequence in sequences]
    nodes = [sequence.level(PATHS[: 1 + i % 5]) for i, sequence in enumerate(sequences)]
    together, alone = (executor_of(files, eager=eager) for _ in range(2))
    for rows in (chunks, nodes):
        expected = torch.cat([logits(alone, row) for row in rows])
        torch.testing.assert_close(logits(together, *rows), expected, rtol=0, atol=0, equal_nan=True)


def test_several_roots_of_a_chunk(heads: dict[str, HeadFiles]) -> None:
    files = heads["windowed"]
    executor, sequence = executor_of(files, eager=False), Drafted.random(9, free_slots())
    found = logits(executor, structs.replace(sequence.chunk(), kept=[3, 6, 8]))
    expected = [PeagleFormulas(files).levels(sequence.known[:i], sequence.tokens[: i + 1])[0] for i in (3, 6, 8)]
    torch.testing.assert_close(found.double(), torch.stack(expected), rtol=0, atol=1e-4)


def test_chains_are_kept_or_computed_again(heads: dict[str, HeadFiles], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pilotfish.model.heads.roots.ROOTS", 2)
    files, free = heads["normed"], free_slots()
    executor = executor_of(files, eager=False)
    assert isinstance(executor, MaskedExecutor)
    sequences = [Drafted.random(5 + i, free, seed=i) for i in range(3)]
    assert logits(executor, *(sequence.chunk() for sequence in sequences)).isfinite().all()
    forwards = list[int]()
    run = executor.rows.module.forward
    monkeypatch.setattr(executor.rows.module, "forward", lambda x, *rest: forwards.append(len(x)) or run(x, *rest))
    for sequence in sequences[::-1]:
        levels = PeagleFormulas(files).levels(sequence.known, sequence.tokens)
        found = logits(executor, sequence.level(PATHS[:4]))
        torch.testing.assert_close(found.double(), levels[[1, 1, 2, 3]], rtol=0, atol=1e-4)
    assert forwards == [TOKENS - 1]  # of the one that was given up


def test_the_masks_state_stands_for_unknown_features(heads: dict[str, HeadFiles]) -> None:
    files = heads["vllm"]
    executor, sequence = executor_of(files, eager=False), Drafted.random(9, free_slots())
    chunk = sequence.chunk()
    assert chunk.features is not None
    chunk.features[[1, 5, 6]] = np.nan
    sequence.features[[0, 4, 5]] = PeagleFormulas(files).mask().float().numpy()
    assert_as_formulas(executor, files, sequence, chunk)


# -- files


@pytest.mark.parametrize("dialect", PEAGLE_DIALECTS)
def test_every_dialect_is_read_into_the_same_record(dialect: str, target: TargetFacts, tmp_path: Path) -> None:
    head = write_peagle(tmp_path, dialect, target=target, tokens=6, depth=2)
    spec = read_spec(head, target)
    assert is_head(head)
    assert isinstance(spec.head, MaskedHead)
    assert (spec.kind, spec.dialect, spec.other_layers) == ("peagle", dialect, ())
    assert (spec.head.depth, spec.head.mask_token, spec.head.decoder.layers) == (6, MASK, 2)
    assert spec.projection.layers == (2, 4, 5)
    assert not spec.head.residual_normed  # as vLLM takes it, other than EAGLE-3's
    change_config(head, norm_before_residual=True, norm_output=True)
    assert read_spec(head, target).head == replace(spec.head, residual_normed=True)


@pytest.mark.parametrize("name", ["pard_token", "mask_token_id"])
def test_other_names_of_the_mask(name: str, target: TargetFacts, tmp_path: Path) -> None:
    head = write_peagle(tmp_path, "vllm", target=target)
    change_config(head, ptd_token_id=None, parallel_drafting=True, num_depths=None, **{name: 7})
    spec = read_spec(head, target).head
    assert isinstance(spec, MaskedHead)
    assert (spec.mask_token, spec.depth) == (7, 8)
