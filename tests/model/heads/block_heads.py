"""Tiny random block drafters and Medusa heads, and what they give by the formulas of their papers: float64, one block
at a time, no cache. And what an executor says after a sequence's tokens and nodes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from recurrent_formulas import Drafted
from support import RowSampling, sampling_of
from torch import Tensor

from pilotfish.core.sampling.sampling_params import SamplingParams
from pilotfish.core.scheduling.executor import Executor, SequenceRows
from pilotfish.model.heads.executor import HeadSetup
from pilotfish.model.heads.families.block import BlockHead
from pilotfish.model.heads.families.medusa import MedusaHead
from pilotfish.model.heads.spec import FINAL, Decoder, HeadFiles, HeadSpec, Projection

VOCAB, DRAFT_VOCAB, HIDDEN, RANK = 96, 60, 48, 8
DECODER = Decoder(layers=2, hidden=HIDDEN, heads=4, kv_heads=2, head_dim=32, ffn=56, qk_norm=True, context=512)
#: Those that the tests go through. A window that prompts of the tests, but not blocks, outgrow.
BLOCKS: dict[str, dict[str, Any]] = {
    "dflash": {"block": 6, "anchored": False},
    "dflash_causal": {"block": 6, "anchored": False, "causal": True, "window": 9},
    "dspark": {"block": 5, "anchored": True, "markov_rank": RANK, "confidence": "markov"},
    "dspark_gated": {"block": 4, "anchored": True, "markov_rank": RANK, "markov": "gated", "confidence": "hidden"},
    "dspark_window": {"block": 4, "anchored": True, "markov_rank": RANK, "window": 7, "reduced": True},
}


def block_head(kind: str, seed: int = 0, **changes: Any) -> HeadFiles:
    fields = {**BLOCKS[kind], **changes}
    reduced, window = fields.pop("reduced", False), fields.pop("window", 0)
    decoder = Decoder(**{**vars(DECODER), "window": window})
    projection = Projection((1, 2), HIDDEN, feature_norm=True)
    head = BlockHead(projection, decoder, mask_token=VOCAB - 1, **fields)
    draft_vocab = DRAFT_VOCAB if reduced else VOCAB
    spec = HeadSpec(head, "dspark" if head.anchored else "dflash", "test", HIDDEN, 4, draft_vocab)
    return _random(spec, seed, f"{kind} {seed}", reduced=reduced)


def parallel_head(seed: int = 0, heads: int = 3, blocks: int = 2, *, reduced: bool = False) -> HeadFiles:
    head = MedusaHead(Projection((FINAL,), HIDDEN, fc=False), HIDDEN, heads, blocks)
    spec = HeadSpec(head, "medusa", "test", HIDDEN, 4, DRAFT_VOCAB if reduced else VOCAB)
    return _random(spec, seed, f"medusa {seed}", reduced=reduced)


def _random(spec: HeadSpec, seed: int, name: str, *, reduced: bool) -> HeadFiles:
    """Weights of a size that lets every part of a head count; norms near 1."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for tensor, shape in spec.head.shapes(spec, VOCAB).items():
        x = torch.randn(shape, generator=generator)
        wide = len(shape) == 2 and "embed" not in tensor and "w1" not in tensor
        tensors[tensor] = 1 + 0.3 * x if "norm" in tensor else x * (1.5 / math.sqrt(shape[1]) if wide else 0.7)
    d2t = torch.randperm(VOCAB, generator=generator)[: spec.draft_vocab].sort().values if reduced else None
    return HeadFiles(spec, tensors, d2t, name)


# -- by the formulas


@dataclass(frozen=True)
class BlockFormulas:
    files: HeadFiles

    @property
    def head(self) -> BlockHead:
        assert isinstance(self.files.spec.head, BlockHead)
        return self.files.spec.head

    def tensor(self, name: str) -> Tensor:
        return self.files.tensors[name].double()

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.head.decoder.eps).rsqrt() * self.tensor(f"{name}.weight")

    def rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [rows, heads, head_dim]"""
        half = x.shape[-1] // 2
        theta = self.head.decoder.rope["rope_theta"]
        angles = positions[:, None, None].double() * theta ** (-torch.arange(half).double() / half)
        left, right = x[..., :half], x[..., half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)

    def states(self, features: Tensor, anchor: int) -> Tensor:
        """Of all slots, normed: the anchor follows the tokens whose features these are, [context, hidden]."""
        d, block, context = self.head.decoder, self.head.block, len(features)
        ids = torch.tensor([anchor] + [self.head.mask_token] * (block - 1))
        x, features = self.tensor("embed_tokens.weight")[ids], features.double()
        own = torch.arange(context, context + block)
        positions = torch.cat([torch.arange(context), own])
        visible = torch.ones(block, context + block, dtype=torch.bool)
        distance = own[:, None] - positions
        if self.head.causal:
            visible &= distance >= 0
        if d.window:
            visible &= distance.abs() < d.window
        for i in range(d.layers):
            name = f"layers.{i}.self_attn"
            h = self.norm(x, f"layers.{i}.input_layernorm")
            both = torch.cat([features, h])
            q = self.norm((h @ self.tensor(f"{name}.q_proj.weight").T).view(block, d.heads, -1), f"{name}.q_norm")
            k = (both @ self.tensor(f"{name}.k_proj.weight").T).view(len(both), d.kv_heads, -1)
            v = (both @ self.tensor(f"{name}.v_proj.weight").T).view(len(both), d.kv_heads, -1)
            k = self.norm(k, f"{name}.k_norm")
            q, k = self.rotated(q, own), self.rotated(k, positions)
            k, v = (y.repeat_interleave(d.heads // d.kv_heads, dim=1) for y in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(d.head_dim)
            weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
            attended = torch.einsum("hqk,khd->qhd", weights, v).reshape(block, -1)
            x = x + attended @ self.tensor(f"{name}.o_proj.weight").T
            h = self.norm(x, f"layers.{i}.post_attention_layernorm")
            gate, up = (h @ self.tensor(f"layers.{i}.mlp.{part}_proj.weight").T for part in ("gate", "up"))
            x = x + (torch.nn.functional.silu(gate) * up) @ self.tensor(f"layers.{i}.mlp.down_proj.weight").T
        return self.norm(x, "norm")

    def logits(self, states: Tensor, anchor: int, path: list[int]) -> tuple[Tensor, Tensor] | None:
        """After a block's anchor and `path`, [draft vocab], and the log-confidence; None where the block ends."""
        slot = len(path) + (0 if self.head.anchored else 1)
        if slot >= self.head.block:
            return None
        h = states[slot]
        logits, seen = self.tensor("lm_head.weight") @ h, h
        if self.head.markov_rank:
            w1 = self.tensor("markov.w1.weight")[[anchor, *path][-1]]
            both, gate = torch.cat([h, w1]), torch.ones(())
            if self.head.markov == "gated":
                gate = (self.tensor("markov.gate.weight") @ both + self.tensor("markov.gate.bias")).sigmoid()
            logits = logits + self.tensor("markov.w2.weight") @ (gate * w1)
            seen = both if self.head.confidence == "markov" else h
        if not self.head.confidence:
            return logits, torch.zeros(())
        return logits, (self.tensor("confidence.weight")[0] @ seen + self.tensor("confidence.bias")[0]).sigmoid().log()

    def log_chances(self, features: Tensor, anchor: int, path: list[int]) -> Tensor:
        """Of each token after `path`, at temperature 0: -inf where the head has none, or its block ends. [vocab]"""
        known = self.logits(self.states(features, anchor), anchor, path)
        vocab = len(self.tensor("embed_tokens.weight"))
        if known is None:
            return torch.full((vocab,), -torch.inf, dtype=torch.float64)
        return by_target(self.files, known[0].log_softmax(dim=-1), vocab) + known[1]


def by_target(files: HeadFiles, of_draft: Tensor, vocab: int = VOCAB) -> Tensor:
    """[draft vocab] -> [vocab], -inf where the head has none."""
    told = torch.full((vocab,), -torch.inf, dtype=torch.float64)
    told[slice(None) if files.d2t is None else files.d2t] = of_draft
    return told


def parallel_log_chances(files: HeadFiles, feature: Tensor, depth: int, vocab: int = VOCAB) -> Tensor:
    """Of the tokens `depth` below the root, from the feature of the token before the root. [vocab]"""
    head = files.spec.head
    assert isinstance(head, MedusaHead)
    if depth > head.heads:
        return torch.full((vocab,), -torch.inf, dtype=torch.float64)
    x, name = feature.double(), f"heads.{depth - 1}"
    for j in range(head.blocks):
        w, b = files.tensors[f"{name}.blocks.{j}.weight"], files.tensors.get(f"{name}.blocks.{j}.bias")
        x = x + torch.nn.functional.silu(w.double() @ x + (0.0 if b is None else b.double()))
    return by_target(files, (files.tensors[f"{name}.lm_head.weight"].double() @ x).log_softmax(dim=-1), vocab)


# -- by an executor

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


def executor_of(files: HeadFiles, *, eager: bool = False, num_slots: int = 400, vocab: int = VOCAB) -> Executor:
    return files.executor(HeadSetup(CPU, torch.float32, num_slots, eager, vocab))


def sequenced(length: int, slots: Iterable[int], seed: int) -> Drafted:
    return Drafted.random(length, iter(slots), seed, vocab=VOCAB, hidden=HIDDEN)


def log_chances(executor: Executor, rows: Sequence[SequenceRows]) -> Tensor:
    """Of every token after each kept row, at temperature 0. float64 [kept rows, vocab]"""
    kept = sum(len(s.kept) + len(s.nodes) for s in rows)
    outcome = executor.execute(rows, sampling_of([RowSampling(GREEDY, 1, 7)] * kept, children=executor.vocab_size))
    told = np.full((kept, executor.vocab_size), -np.inf)
    if not kept:
        return torch.from_numpy(told)
    assert outcome.log_chances is not None
    for row in range(kept):
        told[row, outcome.tokens[row]] = outcome.log_chances[row]
    return torch.from_numpy(told)
