"""Modules of transformers' models, made anew out of a device's parts (`kernels.Kernels`)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pilotfish.core.scheduling.executor import LayerProgress
from pilotfish.model.attention import AttentionMetadata, Scoring
from pilotfish.model.experts import Affine, Expert, ExpertRouter, affine, expert_parts, halves
from pilotfish.model.grouped import dense
from pilotfish.model.kernels import Gate, Kernels, RMSNorm, replace_modules
from pilotfish.model.kv_planes import KVPool
from pilotfish.model.loading.configuration import ARCHITECTURES, activation, layer_windows

#: Endings of transformers' names of modules that are replaced.
_PARTS = ("Attention", "RMSNorm", "MLP", "Experts", "TopKRouter")


def fused(kernels: Kernels, module: Any) -> torch.nn.Module | None:
    """None if its parts may be replaced instead."""
    if isinstance(module, torch.nn.Linear):
        return kernels.linear(affine(module))
    match next((part for part in _PARTS if type(module).__name__.endswith(part)), None):
        case "Attention" if hasattr(module, "kv_b_proj"):
            return AbsorbedAttention(module, kernels)
        case "Attention":
            return FusedAttention(module, kernels)
        case "RMSNorm":
            return _norm(module, kernels)
        case "MLP" if hasattr(module, "down_proj"):
            both = getattr(module, "gate_up_proj", None)
            gate, up = map(affine, (module.gate_proj, module.up_proj)) if both is None else halves(both)
            return kernels.feed_forward(gate, up, affine(module.down_proj), Gate(activation(module.config)))
        case "Experts":
            return kernels.mixture([_expert(module, i) for i in range(module.num_experts)], _gate(module))
        case "TopKRouter":
            linear = kernels.linear(Affine(module.weight, getattr(module, "bias", None)))
            return ExpertRouter(linear, module.top_k, over_all=not getattr(module, "norm_topk_prob", True))
    return None


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
        self.joined, self.out = kernels.linear(*map(affine, inputs)), kernels.linear(affine(attention.o_proj))
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


class AbsorbedAttention(torch.nn.Module):
    """Multi-head latent attention (arXiv 2405.04434) with what made keys and values of latents moved to queries and
    outputs: all heads attend to one key, a token's latent and its rotated part, whose latent is the value too."""

    def __init__(self, attention: Any, kernels: Kernels) -> None:
        super().__init__()
        config = attention.config
        self.kernels, self.layer, self.heads = kernels, attention.layer_idx, config.num_attention_heads
        self.sizes = [attention.qk_nope_head_dim, attention.qk_rope_head_dim]  # of a query: plain, rotated
        self.latent_sizes = [attention.kv_lora_rank, attention.qk_rope_head_dim]
        self.scoring = Scoring(attention.scaling)
        paired = getattr(config, "rope_interleave", True)
        *down, up = [attention.q_proj] if attention.q_proj else [attention.q_a_proj, attention.q_b_proj]
        queries = [kernels.linear(_in_halves(up, self.heads, self.sizes, paired=paired))]
        if down:
            queries = [kernels.linear(affine(down[0])), _plain_norm(attention.q_a_layernorm, kernels), *queries]
        self.queries, self.out = torch.nn.Sequential(*queries), kernels.linear(affine(attention.o_proj))
        self.latents = kernels.linear(_in_halves(attention.kv_a_proj_with_mqa, 1, self.latent_sizes, paired=paired))
        self.norm = _plain_norm(attention.kv_a_layernorm, kernels)
        keys, values = _parts_of_heads(attention.kv_b_proj, self.heads, self.sizes[0])
        self.to_latents, self.to_values = kernels.head_linear(keys.mT), kernels.head_linear(values)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any,
        metadata: AttentionMetadata,
        kv: KVPool,
        progress: LayerProgress | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """hidden_states [1, rows, K]; cos and sin [1, rows, rotated part], or of half of it one complex tensor
        -> [1, rows, K]. Writes KV."""
        x, angles = hidden_states[0], position_embeddings
        whole = isinstance(angles, tuple)
        cos, sin = (part[0].contiguous() for part in (angles if whole else (angles.real, angles.imag)))
        q, q_turned = self.queries(x).view(len(x), self.heads, -1).split(self.sizes, dim=-1)
        latent, k_turned = self.latents(x)[:, None].split(self.latent_sizes, dim=-1)
        q_turned, k_turned = (
            self.kernels.rotate(part, cos, sin, 1 if whole else 2).to(x.dtype) for part in (q_turned, k_turned)
        )
        queries = torch.cat((self.to_latents(q), q_turned), dim=-1)
        keys = torch.cat((self.norm(latent), k_turned), dim=-1)
        attended = self.kernels.attend(queries, keys, keys, kv[self.layer], metadata, self.scoring)
        out = self.out(self.to_values(attended[..., : self.latent_sizes[0]]).flatten(1))
        if progress is not None:
            progress.wrote(self.layer)
        return out[None], None


def _plain_norm(norm: Any, kernels: Kernels) -> RMSNorm:
    return kernels.rms_norm(norm.weight.detach(), norm.variance_epsilon)


def _in_halves(linear: Any, heads: int, sizes: Sequence[int], *, paired: bool) -> Affine:
    """With the rotated outputs of each head, if neighbours are `paired`, as the two halves that `rotate` takes."""
    weight, bias = affine(linear)
    if not paired:
        return Affine(weight, bias)
    places = torch.arange(heads * sum(sizes)).view(heads, -1)
    plain, rotated = places[:, : sizes[0]], places[:, sizes[0] :]
    order = torch.cat((plain, rotated[:, ::2], rotated[:, 1::2]), dim=1).flatten()
    return Affine(weight[order], None if bias is None else bias[order])


def _parts_of_heads(linear: Any, heads: int, keys: int) -> tuple[Tensor, Tensor]:
    """What makes each head's keys [heads, `keys`, latent] and values [heads, size, latent]."""
    weight = dense(affine(linear).weight)
    of_heads = weight.view(heads, -1, weight.shape[1])
    return of_heads[:, :keys], of_heads[:, keys:]


class LibraryKernels(Kernels):
    """The reference of whole models: transformers' modules, but for attention to latents, whose KV these expand."""

    def replace(self, model: Any, context: int, *, alone: bool) -> Any:
        model, latent = super().replace(model, context, alone=alone), partial(AbsorbedAttention, kernels=self)
        replace_modules(model, lambda module: latent(module) if hasattr(module, "kv_b_proj") else None)
        return model
