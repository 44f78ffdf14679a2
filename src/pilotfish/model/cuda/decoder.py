from types import SimpleNamespace
from typing import Any

import triton
from torch import Tensor

from pilotfish.core.features.features import FINAL
from pilotfish.core.scheduling.executor import LayerProgress
from pilotfish.model.attention import AttentionMetadata
from pilotfish.model.cuda.products import InvariantLinear, SplitProduct
from pilotfish.model.cuda.triton_attention import attend_slots
from pilotfish.model.cuda.triton_kernels.decoder import gate_silu, write_heads
from pilotfish.model.feature_tap import CapturingDecoder
from pilotfish.model.fused import FusedAttention
from pilotfish.model.kv_planes import KVPool, LayerKV

GATES = 1024  # of a program


class TritonDecoder(CapturingDecoder):
    """A plain decoder in ten kernels a layer, of which each adds the parts of the product before it:

    norm · qkv · heads · attention (2) · out · norm · gate_up · gate · down
    """

    @staticmethod
    def fits(model: Any) -> bool:
        """Whether products are our own, heads are rotated whole, and feed-forwards are gated by silu."""
        layers, rope = model.model.layers, model.config.rope_parameters or {}
        if not isinstance(layers[0].self_attn.joined, InvariantLinear):
            return False
        gates = [getattr(layer.mlp, "gated", None) for layer in layers]
        silu = all(gate is not None and gate.kind == "silu" for gate in gates)
        return silu and rope.get("partial_rotary_factor", 1.0) == 1.0

    def forward(
        self,
        input_ids: Tensor,  # [1, rows]
        logits_to_keep: Tensor,  # [kept rows], rows whose logits are wanted
        metadata: AttentionMetadata,
        kv: KVPool,
        progress: LayerProgress | None = None,
        **_: object,
    ) -> SimpleNamespace:
        """`logits` [1, kept rows, vocab]. Writes KV to the pool."""
        residual, product = self.embed_tokens(input_ids[0]), None
        for number, layer in enumerate(self.layers):
            x = layer.input_layernorm.of_product(residual, product)
            self._keep(number, residual)
            attended = self._attended(layer.self_attn, x, metadata, kv[number])
            if progress is not None:
                progress.wrote(number)
            x = layer.post_attention_layernorm.of_product(residual, layer.self_attn.out.split_product(attended))
            product = layer.mlp.down.split_product(gated(layer.mlp.gate_up.split_product(x), x.new_empty(0)))
        x = self.norm.of_product(residual, product)
        self._keep(len(self.layers), residual)
        self._keep(FINAL, x)
        return SimpleNamespace(logits=self.lm_head(x[logits_to_keep])[None])

    def _attended(self, attention: FusedAttention, x: Tensor, metadata: AttentionMetadata, kv: LayerKV) -> Tensor:
        """[rows, heads * head_dim]. Writes KV."""
        product: SplitProduct = attention.joined.split_product(x)  # type: ignore[operator]
        rows, heads, kv_heads, size = len(x), attention.heads, attention.kv_heads, attention.head_dim
        own = kv.key_scales is not None  # rounded afterwards
        q = x.new_empty(rows, heads, size)
        k, v = (x.new_empty(rows, kv_heads, size) for _ in "kv") if own else (kv.keys, kv.values)
        q_norm, k_norm = attention.q_norm, attention.k_norm
        write_heads[rows, heads + 2 * kv_heads](
            product.parts, product.scales, product.row_scales, product.bias,
            None if q_norm is None else q_norm.weight, None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.eps, metadata.row_positions, self.cos, self.sin,
            None if own else metadata.row_slots, q, k, v, product.sums, product.splits, heads, kv_heads, size // 2,
            triton.next_power_of_2(size // 2), num_warps=1,
        )  # fmt: skip
        if own:
            kv.write(metadata.row_slots.long(), k, v)
        return attend_slots(q, kv, metadata, attention.scoring).view(rows, -1)

    def _keep(self, layer: int, states: Tensor) -> None:
        layers, kept = self._captured
        if kept is not None and layer in layers:
            place = layers.index(layer) * states.shape[1]
            kept[:, place : place + states.shape[1]].copy_(states)


def gated(product: SplitProduct, like: Tensor) -> Tensor:
    """silu(gates) * ups: [rows, 2 inner] -> [rows, inner], of the type of `like`."""
    inner, count = product.parts.shape[-1] // 2, product.sums // 2
    out = like.new_empty(count // inner, inner)
    gate_silu[(triton.cdiv(count, GATES),)](
        product.parts, product.scales, product.row_scales, product.bias, out,
        product.sums, count, inner, product.splits, GATES, num_warps=4,
    )  # fmt: skip
    return out
