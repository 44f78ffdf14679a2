"""Modules of transformers' models, made anew out of a device's parts (`kernels.Kernels`)."""

from typing import Any

import torch
from torch import Tensor

from pilotfish.core.scheduling.executor import LayerProgress
from pilotfish.model.attention import AttentionMetadata, Scoring
from pilotfish.model.experts import Affine, Expert, ExpertRouter, expert_parts, halves
from pilotfish.model.kernels import Gate, Kernels, RMSNorm
from pilotfish.model.kv_planes import KVPool
from pilotfish.model.loading.configuration import ARCHITECTURES, activation, layer_windows

#: Endings of transformers' names of modules that are replaced.
_PARTS = ("Attention", "RMSNorm", "MLP", "Experts", "TopKRouter")


def fused(kernels: Kernels, module: Any) -> torch.nn.Module | None:
    """None if its parts may be replaced instead."""
    if isinstance(module, torch.nn.Linear):
        return kernels.linear(_affine(module))
    match next((part for part in _PARTS if type(module).__name__.endswith(part)), None):
        case "Attention":
            return FusedAttention(module, kernels)
        case "RMSNorm":
            return _norm(module, kernels)
        case "MLP" if hasattr(module, "down_proj"):
            both = getattr(module, "gate_up_proj", None)
            gate, up = map(_affine, (module.gate_proj, module.up_proj)) if both is None else halves(both)
            return kernels.feed_forward(gate, up, _affine(module.down_proj), Gate(activation(module.config)))
        case "Experts":
            return kernels.mixture([_expert(module, i) for i in range(module.num_experts)], _gate(module))
        case "TopKRouter":
            linear = kernels.linear(Affine(module.weight, getattr(module, "bias", None)))
            return ExpertRouter(linear, module.top_k, over_all=not getattr(module, "norm_topk_prob", True))
    return None


def _affine(linear: Any) -> Affine:
    return Affine(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())


def _norm(norm: Any, kernels: Kernels) -> RMSNorm:
    about = ARCHITECTURES[type(norm).__name__.replace("RMSNorm", "ForCausalLM")]
    weight = norm.weight.detach()
    weight = (weight.float() if about.get("rounds_once") else weight) + about.get("norm_offset", 0.0)
    return kernels.rms_norm(weight, float(norm.eps if hasattr(norm, "eps") else norm.variance_epsilon))


def _expert(experts: Any, index: int) -> Expert:
    gate_up, down = expert_parts(experts, index)
    gate, up = halves(gate_up, interleaved=not experts.is_concatenated)
    return Expert(gate, up, down)


def _gate(experts: Any) -> Gate:
    if type(experts).__name__ == "GptOssExperts":
        return Gate("clamped", experts.alpha, experts.limit)
    return Gate(activation(experts.config))


class QueryScales:
    """Of Ministral 3: queries grow with how often their position holds the original context. A table, as torch's
    logarithm gives an element other bits among the last of a batch."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        self._original = config.rope_parameters["original_max_position_embeddings"]
        times = torch.arange(config.max_position_embeddings // self._original + 1, device=device)
        self._scales = (1 + config.rope_parameters["llama_4_scaling_beta"] * torch.log1p(times)).to(dtype)

    def of(self, positions: Tensor) -> Tensor:
        scales: Tensor = self._scales[positions // self._original]
        return scales


class FusedAttention(torch.nn.Module):
    def __init__(self, attention: Any, kernels: Kernels) -> None:
        super().__init__()
        config = attention.config
        self.kernels, self.layer, self.head_dim = kernels, attention.layer_idx, attention.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.scoring = Scoring(
            attention.scaling,
            layer_windows(config)[self.layer],
            getattr(attention, "attn_logit_softcapping", None) or 0.0,
            None if (sinks := getattr(attention, "sinks", None)) is None else sinks.detach().clone(),
        )
        self.rotated_per_angle = 2 if type(attention).__name__ == "GptOssAttention" else 1
        self.query_scales: QueryScales | None = None
        if type(attention).__name__ == "Ministral3Attention":
            self.query_scales = QueryScales(config, attention.q_proj.weight.dtype, kernels.device)
        qkv = getattr(attention, "qkv_proj", None)
        inputs = [qkv] if qkv else [attention.q_proj, attention.k_proj, attention.v_proj]
        self.joined, self.out = kernels.linear(*map(_affine, inputs)), kernels.linear(_affine(attention.o_proj))
        norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        self.q_norm, self.k_norm = (None if norm is None else _norm(norm, kernels) for norm in norms)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        kv: KVPool,
        position_ids: Any = None,  # [1, rows]
        progress: LayerProgress | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """hidden_states [1, rows, K], cos and sin [1, rows, rotated part of a head or half of it] -> [1, rows, K].
        Writes KV."""
        cos, sin = (angles[0] for angles in position_embeddings)
        rows = self.joined(hidden_states[0]).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        q, k, v = rows.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm.of_heads(q), self.k_norm.of_heads(k)
        q, k = (self.kernels.rotate(x, cos, sin, self.rotated_per_angle) for x in (q, k))
        if self.query_scales is not None:
            q = q * self.query_scales.of(position_ids[0])[:, None, None]
        out = self.kernels.attend(q, k, v, kv[self.layer], metadata, self.scoring)
        attended = self.out(out.reshape(-1, self.heads * self.head_dim))
        if progress is not None:
            progress.wrote(self.layer)
        return attended[None], None
