"""Medusa: a head for each depth, over one feature. Keeps no KV, but features of roots."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from pilotfish.core.scheduling.executor import Sampling, SequenceRows
from pilotfish.model.batch import EXACT
from pilotfish.model.heads.executor import DraftVocab, HeadExecutor, HeadLogits, HeadSetup, filled
from pilotfish.model.heads.families.layout import HeadLayout, HeadSource
from pilotfish.model.heads.parts import Parts
from pilotfish.model.heads.roots import KeptRow, RootStates, kept_rows
from pilotfish.model.heads.spec import FINAL, POSITIONS, Head, HeadFiles, HeadMemory, HeadSpec, Projection, Shapes

#: Roots whose features are kept. Nodes below others get no children.
KEPT_ROOTS = 4096


@dataclass(frozen=True)
class MedusaHead(Head):
    """Over the final normed state itself. Tensors of head i, from 0: `heads.{i}.blocks.{j}.{weight,bias}`
    [hidden, hidden], x + silu(W x + b) each, then `heads.{i}.lm_head.weight` [draft vocab, hidden]."""

    hidden: int
    heads: int
    blocks: int
    bias: bool = True
    context = POSITIONS
    shared = ()

    def shapes(self, spec: HeadSpec, vocab: int) -> Shapes:  # noqa: ARG002
        shapes: Shapes = {}
        for i in range(self.heads):
            for j in range(self.blocks):
                shapes[f"heads.{i}.blocks.{j}.weight"] = (self.hidden, self.hidden)
                if self.bias:
                    shapes[f"heads.{i}.blocks.{j}.bias"] = (self.hidden,)
            shapes[f"heads.{i}.lm_head.weight"] = (spec.draft_vocab, self.hidden)
        return shapes

    @property
    def guesses(self) -> str:
        return f"{self.heads} tokens at once, each by itself"

    def memory(self) -> HeadMemory:
        return HeadMemory(0, self.hidden, KEPT_ROOTS * self.hidden)

    def executor(self, files: HeadFiles, setup: HeadSetup) -> HeadExecutor:
        return MedusaExecutor(files, setup)


class DepthLogits(torch.nn.Module):
    def __init__(self, head: MedusaHead, parts: Parts, index: int, words: Tensor | slice) -> None:
        super().__init__()
        self.blocks = [parts.product(parts.affine(f"heads.{index}.blocks.{j}")) for j in range(head.blocks)]
        self.lm_head = parts.product(parts.affine(f"heads.{index}.lm_head", words))

    def forward(self, x: Tensor) -> Tensor:
        """x [rows, hidden] -> float32 [rows, draft vocab]"""
        for block in self.blocks:  # in float64: vectors and what is left of a row have other last bits
            x = x + F.silu(block(x).double()).to(x.dtype)
        logits: Tensor = self.lm_head(x)
        return logits.float()


class MedusaExecutor(HeadExecutor):
    def __init__(self, files: HeadFiles, setup: HeadSetup) -> None:
        head = cast(MedusaHead, files.spec.head)
        known = files.spec.draft_vocab if files.d2t is None else int(files.d2t.max()) + 1
        target_size = known if setup.vocab_size is None else setup.vocab_size
        vocab = DraftVocab.of(files.spec.draft_vocab, files.d2t, target_size, setup)
        super().__init__(head.projection.width, setup, head.context, vocab, EXACT)
        self.deepest = head.heads
        parts = Parts(files.tensors, setup.kernels(), setup.dtype)
        self.heads = [DepthLogits(head, parts, i, vocab.words) for i in range(head.heads)]
        self._features = RootStates(KEPT_ROOTS)  # [hidden] each, of the token before the root
        self._dtype = setup.dtype

    def run(self, rows: Sequence[SequenceRows], sampling: Sampling) -> HeadLogits:  # noqa: ARG002
        for s in rows:
            self._keep_features(s)
        kept = [row for s in rows for row in kept_rows(s)]
        return self._below(kept) if kept else HeadLogits(torch.zeros(0, self.vocab.size))

    def _keep_features(self, rows: SequenceRows) -> None:
        slots = rows.prefix_slots[rows.start :].tolist()
        self._features.forget(slots)
        if not rows.kept:
            return
        features, unknown = filled(rows, self.feature_width)
        above = self._features.get(int(rows.prefix_slots[rows.start - 1])) if rows.start else None
        for offset in rows.kept:
            value = self.feature_values(torch.from_numpy(features[offset : offset + 1]))[0].to(self._dtype)
            self._features.put(slots[offset], above if offset < unknown and above is not None else value)

    def _below(self, kept: Sequence[KeptRow]) -> HeadLogits:
        depths, roots = np.array([row.depth for row in kept]), np.array([row.root for row in kept])
        features = {root: self._features.get(root) for root in roots.tolist()}
        known = np.array([features[root] is not None for root in roots.tolist()]) & (depths < len(self.heads))
        values = torch.full((len(kept), self.vocab.size), torch.nan, device=self._device)
        for depth in np.unique(depths[known]).tolist():
            of_depth = np.flatnonzero(known & (depths == depth))
            distinct, which = np.unique(roots[of_depth], return_inverse=True)
            logits = self.heads[depth](torch.stack([cast(Tensor, features[root]) for root in distinct.tolist()]))
            place, source = (torch.from_numpy(x).to(self._device) for x in (of_depth, which))
            values[place] = logits[source]
        return HeadLogits(values)


# -- layouts: the authors', and vLLM's. The weights say how many heads there are: published configurations are wrong.


def original(source: HeadSource) -> HeadLayout:
    fields = source.fields
    for name in ("medusa_num_heads", "medusa_num_layers", "base_model_name_or_path", "version"):
        fields.take(name)
    blocks = _count(source, r"0\.(\d+)\.linear\.weight")
    names: dict[str, str] = {}
    for name in source.headers:
        ours = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"heads.\1.blocks.\2.", name)
        ours = re.sub(rf"^(\d+)\.{blocks}\.", r"heads.\1.lm_head.", ours)
        names[ours] = name
    return _layout(source, names, blocks, "medusa")


def vllm(source: HeadSource) -> HeadLayout:
    fields = source.fields
    fields.take("num_heads")
    blocks = _count(source, r"blocks\.0\.layers\.(\d+)\.weight")
    fields.only("num_hidden_layers", blocks, "as many blocks as the tensors have")
    fields.only("medusa_fc_bias", "blocks.0.layers.0.bias" in source.headers, "as the tensors have it")
    shared = fields.flag("original_lm_head", False)
    names: dict[str, str] = {}
    for name in source.headers:
        ours = re.sub(r"^blocks\.(\d+)\.layers\.", r"heads.\1.blocks.", name)
        names[re.sub(r"^lm_heads\.(\d+)\.", r"heads.\1.lm_head.", ours)] = name
    if shared and "lm_head.weight" in names:
        one = names.pop("lm_head.weight")
        names |= {f"heads.{i}.lm_head.weight": one for i in range(_count(source, r"blocks\.(\d+)\.layers\.0\.weight"))}
    return _layout(source, names, blocks, "vllm")


def _layout(source: HeadSource, names: dict[str, str], blocks: int, dialect: str) -> HeadLayout:
    fields, target = source.fields, source.target
    hidden = fields.count("hidden_size", target.hidden)
    source.check_target(hidden)
    source.check_vocabulary(fields)
    rows = (source.shape(names.get("heads.0.lm_head.weight", "")) or (target.vocab,))[0]
    fields.only("truncated_vocab_size", rows, "the rows of its lm_heads")
    heads = 1 + max(int(found[1]) for found in (re.match(r"heads\.(\d+)\.", name) for name in names) if found)
    bias = "heads.0.blocks.0.bias" in names
    head = MedusaHead(Projection((FINAL,), hidden, fc=False), hidden, heads, blocks, bias)
    return source.laid_out(head, "medusa", dialect, names, rows)


def _count(source: HeadSource, pattern: str) -> int:
    found = [re.fullmatch(pattern, name) for name in source.headers]
    return 1 + max((int(match[1]) for match in found if match), default=-1)
