import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from pilotfish.core.scheduling.executor import LayerProgress
from pilotfish.model.attention import AttentionMetadata, Scoring
from pilotfish.model.batch import EXACT, Buckets
from pilotfish.model.cpu.native import PANEL, in_panels, pack_codes, pack_weight
from pilotfish.model.experts import Affine
from pilotfish.model.feature_tap import CapturingDecoder
from pilotfish.model.fused import fused
from pilotfish.model.grouped import GroupedWeight, dense, joined
from pilotfish.model.kernels import Gate, Kernels, RMSNorm, replace_modules
from pilotfish.model.kv_planes import KVPool, LayerKV
from pilotfish.model.loading.configuration import ARCHITECTURES

#: activation(gate) * up: rows [rows, 2 n] of gates, then ups -> [rows, n].
GateOp = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PackedWeight:
    """Of linear layers, their outputs end to end."""

    dtype: torch.dtype  # of the inputs
    inputs: int
    outputs: int
    panels: Tensor  # of `dtype`, int8, or codes in groups
    scales: Tensor | None = None  # of int8, float32 [ceil(N / 32) * 32]; of groups, [ceil(N / 32), groups, 32]
    offsets: Tensor | None = None
    table: Tensor | None = None

    @classmethod
    def of(cls, *weights: Any) -> "PackedWeight":
        size = weights[0].dtype, weights[0].shape[1], sum(map(len, weights))
        if not all(isinstance(weight, GroupedWeight) for weight in weights):
            values = [dense(weight) for weight in weights]
            return cls(*size, pack_weight(torch.cat(values) if len(values) > 1 else values[0]))
        one = joined(weights)
        whole = one.scales.shape[1] == 1 and one.scales.dtype == torch.float32 and one.offsets is None
        if whole and one.codes.dtype == torch.int8:
            scales = torch.nn.functional.pad(one.scales.flatten(), (0, -len(one) % PANEL))
            return cls(*size, pack_weight(one.codes, one.dtype), scales)
        offsets = None if one.offsets is None else in_panels(one.offsets)
        return cls(*size, pack_codes(one), in_panels(one.scales), offsets, one.table)

    @functools.cached_property
    def native(self) -> Any:
        """As the kernels take it."""
        like, factors = torch.empty(0, dtype=self.dtype), (self.scales, self.offsets, self.table)
        return torch.classes.pilotfish.PackedWeight(self.panels, like, self.inputs, self.outputs, *factors)


class PackedLinear(torch.nn.Module):
    def __init__(self, *linears: Affine) -> None:
        super().__init__()
        self.weight = PackedWeight.of(*(linear.weight for linear in linears))
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self.cap = 0.0  # of outputs (the head of Gemma 2): cap * tanh(output / cap); 0: none

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.pilotfish.linear(x.reshape(-1, x.shape[-1]), self.weight.native)
        if self.bias is not None:
            y = y + self.bias
        if self.cap:
            y = torch.ops.pilotfish.softcap(y, self.cap)
        return y.view(*x.shape[:-1], self.weight.outputs)


class PackedHeads(torch.nn.Module):
    """As `Kernels.head_linear`; each head in whole panels."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.outputs, panels = weight.shape[1], torch.cat([pack_weight(each) for each in weight])
        self.weight = PackedWeight(weight.dtype, weight.shape[2], PANEL * len(panels), panels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.pilotfish.head_linear(x, self.weight.native, self.outputs)  # type: ignore[no-any-return]


class PackedGatedMLP(torch.nn.Module):
    def __init__(self, gate: Affine, up: Affine, down: Affine) -> None:
        super().__init__()
        self.gate, self.up, self.down = (PackedWeight.of(linear.weight) for linear in (gate, up, down))

    def forward(self, x: Tensor) -> Tensor:
        weights = [weight.native for weight in (self.gate, self.up, self.down)]
        y: Tensor = torch.ops.pilotfish.gated_mlp(x.reshape(-1, x.shape[-1]), *weights)
        return y.view_as(x)


class ActivatedMLP(torch.nn.Module):
    def __init__(self, gate: Affine, up: Affine, down: Affine, op: GateOp) -> None:
        super().__init__()
        self.gate_up, self.down, self.op = PackedLinear(gate, up), PackedLinear(down), op

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(self.op(self.gate_up(x.reshape(-1, x.shape[-1]))))
        return y.view_as(x)


class FusedRMSNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.pilotfish.rms_norm(x, self.weight, self.eps, self.parts)  # type: ignore[no-any-return]

    def of_sum(self, residual: Tensor, x: Tensor) -> Tensor:
        return torch.ops.pilotfish.add_rms_norm(residual, x, self.weight, self.eps)  # type: ignore[no-any-return]


def native_tree_attention(
    q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, metadata: AttentionMetadata, scoring: Scoring
) -> Tensor:
    fields = (field for record in (kv, metadata, scoring) for field in vars(record).values())  # in the kernel's order
    return torch.ops.pilotfish.tree_attention(q, k, v, *fields)  # type: ignore[no-any-return]


class NativeKernels(Kernels):
    native = True
    attend = staticmethod(native_tree_attention)

    def buckets(self) -> Buckets:
        return EXACT

    def replace(self, model: Any, context: int, *, alone: bool) -> Any:
        """A plain decoder is replaced whole if its feed-forwards are silu-gated without biases."""
        replace_modules(super().replace(model, context, alone=alone), functools.partial(fused, self))
        model.lm_head.cap = getattr(model.config, "final_logit_softcapping", None) or 0.0
        model.config.final_logit_softcapping = None
        plain = ARCHITECTURES[type(model).__name__].get("plain", False)
        gated = all(isinstance(layer.mlp, PackedGatedMLP) for layer in model.model.layers)
        return PlainDecoder(model, context) if plain and gated and alone else model

    def linear(self, *affines: Affine) -> PackedLinear:
        return PackedLinear(*affines)

    def head_linear(self, weight: Tensor) -> PackedHeads:
        return PackedHeads(weight)

    def rms_norm(self, weight: Tensor, eps: float, parts: int = 1) -> FusedRMSNorm:
        return FusedRMSNorm(weight, eps, parts)

    def feed_forward(self, gate: Affine, up: Affine, down: Affine, gated: Gate) -> torch.nn.Module:
        if gated.kind == "silu" and all(x.bias is None for x in (gate, up, down)):
            return PackedGatedMLP(gate, up, down)
        return ActivatedMLP(gate, up, down, _GATES[gated.kind](gated))

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor, per_angle: int = 1) -> Tensor:
        torch.ops.pilotfish.rotate(x[..., : per_angle * cos.shape[1]], cos, sin)
        return x


_GATES: dict[str, Callable[[Gate], GateOp]] = {
    "silu": lambda _: torch.ops.pilotfish.gate_silu,
    "gelu_pytorch_tanh": lambda _: torch.ops.pilotfish.gate_gelu,
    "clamped": lambda gate: functools.partial(torch.ops.pilotfish.gate_clamped, alpha=gate.alpha, limit=gate.limit),
}


class PlainDecoder(CapturingDecoder):
    """A plain decoder in one call of the kernels: in small models Python between kernels is most of a forward."""

    def __init__(self, model: Any, context: int) -> None:
        super().__init__(model, context)
        first = self.layers[0].self_attn
        heads = (first.heads, first.kv_heads, first.head_dim)
        decoder = torch.classes.pilotfish.Decoder(
            self.embed_tokens.weight, self.cos, self.sin, self.norm.weight, self.norm.eps, *heads
        )
        for layer in self.layers:
            self._add(decoder, layer)
        decoder.set_head(self.lm_head.weight.native, self.lm_head.bias)
        self._decoder = decoder

    @staticmethod
    def _add(decoder: Any, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        weights = [attention.joined.weight, attention.out.weight, mlp.gate, mlp.up, mlp.down]
        decoder.add_layer(
            layer.input_layernorm.weight,
            layer.post_attention_layernorm.weight,
            None if attention.q_norm is None else attention.q_norm.weight,
            None if attention.k_norm is None else attention.k_norm.weight,
            [weight.native for weight in weights],
            attention.joined.bias,
            attention.out.bias,
            attention.scoring.scale,
            attention.scoring.window,
        )

    def forward(
        self,
        input_ids: Tensor,  # [1, rows]
        logits_to_keep: Tensor,  # [kept rows], rows whose logits are wanted
        metadata: AttentionMetadata,
        kv: KVPool,
        progress: LayerProgress | None = None,
        **_: object,
    ) -> SimpleNamespace:
        """`logits` float32 [1, kept rows, vocab]. Writes KV to the pool."""
        planes, (*indices, _) = [plane for layer in kv for plane in layer], vars(metadata).values()
        written = None if progress is None else torch.from_numpy(progress.written)
        logits = self._decoder.forward(input_ids[0], logits_to_keep, *indices, planes, written, *self._captured)
        return SimpleNamespace(logits=logits[None])
