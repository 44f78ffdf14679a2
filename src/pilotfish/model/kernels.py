"""`Kernels` is the one seam between modules and devices, and itself the reference, in torch operations on any
device."""

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from pilotfish.model.attention import TreeAttention, dense_tree_attention
from pilotfish.model.batch import Batch, Buckets, Forwarded, library_buckets
from pilotfish.model.draws import Draws
from pilotfish.model.experts import Affine, Expert, Mixture, row_by_row
from pilotfish.model.grouped import dense

Forward = Callable[[Batch], Forwarded]
#: As `Kernels.draw`.
Draw = Callable[[Tensor, Draws], Tensor]

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(frozen=True)
class Gate:
    """activation(gate) * up: makes [rows, n] of rows [rows, 2 n] of gates, then ups. `kind` is a key of GATES or, with
    gpt-oss's `alpha` and `limit`, "clamped"."""

    kind: str
    alpha: float = 1.0
    limit: float = inf

    def __call__(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        if self.kind != "clamped":
            return GATES[self.kind](gate) * up
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


class Kernels:
    failures: tuple[type[Exception], ...] = ()  # that say that a kernel does not run on the device
    records = False  # whether forwards can be recorded, and replayed without a launch for each operation
    native = False  # whether the C++ kernels compute, so that a row's bits do not depend on the other rows

    def __init__(self, device: torch.device) -> None:
        self.device = device

    #: Attention of all layers whose module is not replaced.
    attend: TreeAttention = staticmethod(dense_tree_attention)

    def buckets(self) -> Buckets:
        return library_buckets(self.device)

    #: Where this device's work has come to, when it comes to it.
    moment: Callable[[], Any] = staticmethod(time.perf_counter)
    #: (end, start) -> seconds between two moments, once what was drawn after them is known.
    seconds: Callable[[Any, Any], float] = staticmethod(operator.sub)

    #: Returns when a moment has come.
    wait: Callable[[Any], None] = staticmethod(lambda _: None)

    # -- whole models

    def replace(self, model: Any, context: int, *, alone: bool) -> Any:  # noqa: ARG002
        """Only if `model` is `alone`, without ranks that meet between its parts, another module may replace it
        whole."""
        replace_modules(model, row_by_row)
        return model

    def recorded(self, forward: Forward, draw: Draw) -> Forward:
        """Only where it `records`. `draw` draws, from the forward's logits, what is masked."""
        raise NotImplementedError

    def draw(self, logits: Tensor, draws: Draws, ids: Tensor | None = None) -> Tensor:
        """As a part of a recording: int64 [samples, 2 k + 1]. The likeliest k = max(1, `draws.children`) tokens (or
        NO_TOKEN), the bits of their chances' logs in float64, and whether all logits are finite: of its row, or of all
        where the draws name rows. `ids` int64 [vocab], ascending: the tokens of a reduced vocabulary, for children of
        plain draws."""
        raise NotImplementedError

    # -- modules of heads

    def linear(self, *affines: Affine) -> torch.nn.Module:
        """One product for several linear layers, their outputs end to end: x [rows, inputs] -> [rows, outputs]."""
        return JoinedLinear(*affines)

    def head_linear(self, weight: Tensor) -> torch.nn.Module:
        """A product for each head: weight [heads, outputs, inputs], x [rows, heads, inputs] -> [rows, heads,
        outputs]."""
        return HeadLinear(weight)

    def rms_norm(self, weight: Tensor, eps: float, parts: int = 1) -> "RMSNorm":
        """Each of `parts` equal parts of a row is normed by itself. `weight` [size]."""
        return RMSNorm(weight, eps, parts)

    def feed_forward(self, gate: Affine, up: Affine, down: Affine, gated: Gate) -> torch.nn.Module:
        """x [..., hidden] -> [..., hidden]"""
        return GatedFeedForward(self.linear(gate, up), self.linear(down), gated)

    def mixture(self, experts: Sequence[Expert], gated: Gate) -> torch.nn.Module:
        """As `experts.mixed`, of its rows alone."""
        return Mixture(self.feed_forward(*expert, gated) for expert in experts)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, per_angle: int = 1) -> Tensor:
        """x [rows, heads, head_dim], maybe in place; cos and sin [rows, rotated part of a head / `per_angle`]."""
        if per_angle == 2:
            cos, sin = (torch.cat((angles, angles), dim=-1) for angles in (cos, sin))
        size = cos.shape[1]
        turned, rest = x[..., :size], x[..., size:]
        halves = torch.cat((-turned[..., size // 2 :], turned[..., : size // 2]), dim=-1)
        return torch.cat((turned * cos[:, None] + halves * sin[:, None], rest), dim=-1)


def replace_modules(module: torch.nn.Module, replacement: Callable[[Any], torch.nn.Module | None]) -> None:
    for name, child in list(module.named_children()):
        replaced = replacement(child)
        if replaced is None:
            replace_modules(child, replacement)
        else:
            setattr(module, name, replaced)


class JoinedLinear(torch.nn.Module):
    def __init__(self, *affines: Affine) -> None:
        super().__init__()
        self.weight = torch.cat([dense(affine.weight) for affine in affines])
        biases = [affine.bias for affine in affines if affine.bias is not None]
        self.bias = torch.cat(biases) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class HeadLinear(torch.nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([F.linear(x[:, head], each) for head, each in enumerate(self.weight)], dim=1)


class GatedFeedForward(torch.nn.Module):
    def __init__(self, gate_up: torch.nn.Module, down: torch.nn.Module, gated: Gate) -> None:
        super().__init__()
        self.gate_up, self.down, self.gated = gate_up, down, gated

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down(self.gated(self.gate_up(x))))


class RMSNorm(torch.nn.Module):
    def __init__(self, weight: Tensor, eps: float, parts: int = 1) -> None:
        super().__init__()
        self.weight, self.eps, self.parts = weight, eps, parts

    def forward(self, x: Tensor) -> Tensor:
        """x [..., size] -> [..., size]. With a float32 weight rounds once, after the product."""
        wide = x.float().reshape(*x.shape[:-1], self.parts, -1)
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (self.weight * normed.to(self.weight.dtype).view_as(x)).to(x.dtype)

    def of_sum(self, residual: Tensor, x: Tensor) -> Tensor:
        return cast(Tensor, self(residual.add_(x)))

    def of_heads(self, x: Tensor) -> Tensor:
        """Norms each head, or all heads together if the weight is that wide. x [rows, heads, head_dim] -> like x."""
        normed: Tensor = self(x.reshape(len(x), -1, self.weight.numel()))
        return normed.view(x.shape)
