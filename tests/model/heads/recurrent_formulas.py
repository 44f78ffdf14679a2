"""EAGLE's and MTP's heads as their publishers write them down: whole sequences, float64, no cache, no slots. Tiny
random heads of every kind, and sequences over the slots of one, with features of their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from head_files import Drawing
from numpy.typing import NDArray
from torch import Tensor

from pilotfish.core.features.features import FINAL
from pilotfish.core.scheduling.executor import NO_NODES, NodeRows, SequenceRows
from pilotfish.model.heads.executor import HeadExecutor, HeadSetup
from pilotfish.model.heads.families.recurrent import RecurrentHead
from pilotfish.model.heads.spec import Decoder, HeadFiles, HeadSpec, Projection

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 64, 4, 2, 32, 96, 160


@dataclass
class Formulas:
    """One head. Position t has the pair of the feature of token t and token t + 1."""

    files: HeadFiles
    first_position: int = 0  # publishers count from 0 or from 1

    def __post_init__(self) -> None:
        self.head: RecurrentHead = self.files.spec.head  # type: ignore[assignment]
        self.weights = {name: x.double() for name, x in self.files.tensors.items()}

    def step(self, states: Tensor, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """states [n, hidden] and the tokens after them -> the next states [n, hidden], logits [n, draft vocab]."""
        w, head = self.weights, self.head
        h, e = states.double(), w["embed_tokens.weight"][torch.tensor(tokens)]
        if head.zero_first_embedding:
            e = torch.cat([torch.zeros_like(e[:1]), e[1:]])
        if head.entry == "wide":
            n = self.norm("hidden_norm", h)
            residual = n if head.residual_normed else h
            x = torch.cat([self.norm("layers.0.input_layernorm", e), n], dim=1)
        else:
            e, h = self.norm("embed_norm", e), self.norm("hidden_norm", h)
            residual = self.linear("input_proj", torch.cat([h, e] if head.hidden_first else [e, h], dim=1))
            x = self.norm("layers.0.input_layernorm", residual)
        for i in range(head.decoder.layers):
            if i:
                x = self.norm(f"layers.{i}.input_layernorm", residual)
            residual = residual + self.attention(i, x)
            residual = residual + self.feed_forward(i, self.norm(f"layers.{i}.post_attention_layernorm", residual))
        out = self.norm("norm", residual)
        return (out if head.recycles_normed else residual), out @ w["lm_head.weight"].T

    def drafted(self, features: Tensor, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
        """Logits after the last token, then after each node of a path below it. features [tokens - 1, hidden]."""
        states, rows = features.double(), list(tokens[1:])
        following, logits = self.step(states, rows)
        told = [logits[-1]]
        for token in path:
            states, rows = torch.cat([states, following[-1:]]), [*rows, token]
            following, logits = self.step(states, rows)
            told.append(logits[-1])
        return torch.stack(told)

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T + self.weights.get(f"{name}.bias", 0.0)

    def norm(self, name: str, x: Tensor) -> Tensor:
        if f"{name}.weight" not in self.weights:
            return x
        weight = self.weights[f"{name}.weight"] + self.head.decoder.norm_offset
        return weight * x / (x.pow(2).mean(-1, keepdim=True) + self.head.decoder.eps).sqrt()

    def feed_forward(self, i: int, x: Tensor) -> Tensor:
        gate, up = (self.linear(f"layers.{i}.mlp.{name}_proj", x) for name in ("gate", "up"))
        act = torch.nn.functional.silu if self.head.decoder.activation == "silu" else gelu_tanh
        return self.linear(f"layers.{i}.mlp.down_proj", act(gate) * up)

    def attention(self, i: int, x: Tensor) -> Tensor:
        d, at, n = self.head.decoder, f"layers.{i}.self_attn.", len(x)
        q, k, v = (self.linear(f"{at}{name}_proj", x).view(n, -1, d.head_dim) for name in "qkv")
        gate = None
        if d.gated_attention:
            q, gate = q.view(n, d.heads, 2, d.head_dim).unbind(2)
        if d.qk_norm:
            q, k = self.norm(f"{at}q_norm", q), self.norm(f"{at}k_norm", k)
        q, k = self.rotate(q), self.rotate(k)
        k, v = (x.repeat_interleave(d.heads // d.kv_heads, dim=1) for x in (k, v))
        behind = torch.arange(n)[:, None] - torch.arange(n)
        scores = torch.einsum("qhd,khd->hqk", q, k) / d.head_dim**0.5
        unseen = (behind < 0) | (behind >= (d.window or n))
        attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(unseen, -torch.inf).softmax(-1), v)
        if gate is not None:
            attended = attended * torch.sigmoid(gate)
        return self.linear(f"{at}o_proj", attended.reshape(n, -1))

    def rotate(self, x: Tensor) -> Tensor:
        """x [n, heads, head_dim], as complex numbers of its two halves."""
        rope = self.head.decoder.rope
        size = int(x.shape[-1] * rope.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, size, 2, dtype=torch.float64) / size
        positions = torch.arange(len(x), dtype=torch.float64) + self.first_position
        angles = positions[:, None] * rope["rope_theta"] ** -exponents
        turned = torch.complex(x[..., : size // 2], x[..., size // 2 : size])
        turned = turned * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat([turned.real, turned.imag, x[..., size:]], dim=-1)


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


# -- random heads

_EAGLE1 = {"entry": "joined", "absent": ("embed_norm", "hidden_norm", "norm", "layers.0.input_layernorm")}
_MTP = {"entry": "joined", "recycles_normed": True}
_QWEN_NEXT = {
    "gated_attention": True,
    "qk_norm": True,
    "norm_offset": 1.0,
    "rope": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}
#: What is special about a head of each kind. `decoder` are fields of that; `absent` are norms that it lacks.
KINDS: dict[str, dict[str, Any]] = {
    "eagle3": {"entry": "wide"},
    "eagle3 normed residual": {"entry": "wide", "residual_normed": True},
    "eagle3.1": {"entry": "wide", "recycles_normed": True},
    "eagle3 of two windowed layers": {"entry": "wide", "decoder": {"layers": 2, "window": 5, "qk_norm": True}},
    "eagle3 with biases": {"entry": "wide", "bias": ("layers.0.self_attn.q_proj", "layers.0.mlp.down_proj")},
    "eagle1": {**_EAGLE1, "bias": ("input_proj",), "decoder": {"activation": "gelu_pytorch_tanh"}},
    "eagle1 with norms": {"entry": "joined", "absent": ("norm", "layers.0.input_layernorm")},
    "mtp deepseek": {**_MTP, "zero_first_embedding": True},
    "mtp mimo": {**_MTP, "hidden_first": True, "zero_first_embedding": True},
    "mtp qwen3-next": {**_MTP, "decoder": _QWEN_NEXT},
}


def random_head(kind: str, *, draft_vocab: int = VOCAB, seed: int = 0) -> HeadFiles:
    about = dict(KINDS[kind])
    absent, biased = about.pop("absent", ()), about.pop("bias", ())
    decoder = Decoder(**{**_SHAPE, **about.pop("decoder", {})})
    head = RecurrentHead(Projection((FINAL,), HIDDEN, fc=False), decoder, **about)
    spec = HeadSpec(head, kind.split()[0], "formulas", HIDDEN, 4, draft_vocab)
    draw, mean = Drawing(seed), 1.0 - decoder.norm_offset
    tensors = {}
    for tensor, shape in head.shapes(spec, VOCAB).items():
        name, _, part = tensor.rpartition(".")
        if part == "weight" and name not in absent:
            tensors[tensor] = draw(*shape, mean=mean) if "norm" in name else draw(*shape)
    if "norm" in absent:  # states would grow with each step, and all that comes of them
        for name, factor in (("input_proj", 0.4), ("layers.0.self_attn.q_proj", 0.1), ("lm_head", 0.1)):
            tensors[f"{name}.weight"] *= factor
    tensors |= {f"{name}.bias": draw(len(tensors[f"{name}.weight"])) for name in biased}
    if any(name.startswith("layers.0.self_attn") for name in biased):  # all of a joined product have one, or none
        tensors |= {f"layers.0.self_attn.{x}_proj.bias": draw(KV_HEADS * HEAD_DIM) for x in "kv"}
    d2t = None
    if draft_vocab < VOCAB:
        d2t = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed))[:draft_vocab]
    return HeadFiles(spec, tensors, d2t, "")


_SHAPE: dict[str, Any] = {
    "layers": 1,
    "hidden": HIDDEN,
    "heads": HEADS,
    "kv_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "ffn": FFN,
    "context": 256,
}


# -- sequences

SLOTS = 600


def executor_of(files: HeadFiles, *, eager: bool, vocab_size: int | None = None) -> HeadExecutor:
    return files.executor(HeadSetup(torch.device("cpu"), torch.float32, SLOTS, eager, vocab_size))


def free_slots(seed: int = 0) -> Iterator[int]:
    return iter(np.random.default_rng(seed).permutation(SLOTS).tolist())


@dataclass
class Drafted:
    tokens: list[int]
    features: NDArray[np.float32]  # [tokens - 1 or more, HIDDEN]
    free: Iterator[int]
    slots: list[int] = field(default_factory=list)
    node_slots: dict[tuple[int, ...], int] = field(default_factory=dict)  # by the tokens of a path

    @classmethod
    def random(
        cls, length: int, free: Iterator[int], seed: int = 0, *, vocab: int = VOCAB, hidden: int = HIDDEN
    ) -> Drafted:
        rng = np.random.default_rng(seed)
        features = rng.normal(size=(length + 16, hidden)).astype(np.float32)
        return cls(rng.integers(0, vocab, length).tolist(), features, free)

    def chunk(self, end: int | None = None) -> SequenceRows:
        """Tokens that have no row yet, up to `end`; the last is kept, unless it is the first."""
        start, end = len(self.slots), len(self.tokens) if end is None else end
        self.slots += [next(self.free) for _ in range(end - start)]
        unknown = np.full((1, self.features.shape[1]), np.nan, np.float32)
        before = np.concatenate([unknown, self.features])[start:end]
        slots = np.array(self.slots, np.int32)
        kept = [end - start - 1] if end > 1 else []
        return SequenceRows(start, self.tokens[start:end], slots, NO_NODES, kept, before)

    def level(self, paths: Sequence[tuple[int, ...]]) -> SequenceRows:
        """Nodes; where they had their rows before, again in the same slots."""
        for above in (path[:depth] for path in paths for depth in range(1, len(path) + 1)):
            if above not in self.node_slots:
                self.node_slots[above] = next(self.free)
        depths = np.array([len(path) for path in paths])
        slots = np.zeros((len(paths), max(depths)), np.int32)
        for row, path in enumerate(paths):
            slots[row, : len(path)] = [self.node_slots[path[: i + 1]] for i in range(len(path))]
        nodes = NodeRows(np.array([path[-1] for path in paths]), depths, slots)
        return SequenceRows(len(self.slots), [], np.array(self.slots, np.int32), nodes, ())

    def commit(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.node_slots.clear()

    @property
    def known(self) -> Tensor:
        return torch.from_numpy(self.features[: len(self.tokens) - 1])


def logits(executor: HeadExecutor, *rows: SequenceRows) -> Tensor:
    return executor.forward(rows).values
