"""The tensors in the files' headers, and those that the architecture needs (`architectures.toml`). Imports no torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from safetensors import safe_open

from pilotfish.errors import ModelError
from pilotfish.model.loading.configuration import ARCHITECTURES
from pilotfish.model.loading.metadata import read_object

_NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True)
class TensorHeader:
    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors write it: F32, BF16, I64, …


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that transformers reads; ModelError if none, or if the index is unreadable."""
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise ModelError(f"model: {directory} has no safetensors weights: neither {whole.name} nor {index.name}")
    fields = read_object(index)
    names = fields.get("weight_map")
    if not (isinstance(names, dict) and isinstance(fields.get("metadata"), dict)) or not all(
        isinstance(name, str) for name in names.values()
    ):
        raise ModelError(f"model: {index} lacks weight_map or metadata, which transformers needs")
    for name in names.values():
        if not name.endswith(".safetensors"):
            raise ModelError(f"model: {index} names {name!r}; weights are read from safetensors files alone")
    return [directory / name for name in sorted(set(names.values()))]


def safetensors_headers(file: Path) -> dict[str, TensorHeader]:
    """OSError or SafetensorError for a file that is missing, cut off or damaged."""
    with safe_open(file, framework="np") as opened:  # numpy has no bfloat16, but headers need none
        slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118  # it is no mapping
        return {name: TensorHeader(file, tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}


# -- what an architecture needs


@dataclass(frozen=True)
class Weight:
    name: str
    shape: tuple[int, ...]
    linear: bool = False  # whether it is the weight of a linear layer; routers and experts have other modules

    @property
    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class ExpertSizes:
    count: int
    inner: int  # neurons of each


def model_weights(config: Any) -> list[Weight]:
    """`config` is as `load_config` gives it. Includes the head, also if tied."""
    about, hidden = ARCHITECTURES[config.architectures[0]], config.hidden_size
    weights = [Weight("model.embed_tokens.weight", (config.vocab_size, hidden))]
    for layer in range(config.num_hidden_layers):
        norms = (Weight(f"{name}.weight", (hidden,)) for name in about.get("norms", _NORMS))
        parts = (*_attention(config, about), *_feed_forward(config, about, layer), *norms)
        weights += [replace(part, name=f"model.layers.{layer}.{part.name}") for part in parts]
    head = Weight("lm_head.weight", (config.vocab_size, hidden), linear=True)
    return [*weights, Weight("model.norm.weight", (hidden,)), head]


def expert_sizes(config: Any, layer: int) -> ExpertSizes | None:
    about = ARCHITECTURES[config.architectures[0]]
    if "router" not in about:
        return None
    count: int = config.num_local_experts
    dense = about.get("dense_layers") and (
        layer in config.mlp_only_layers or count == 0 or (layer + 1) % config.decoder_sparse_step
    )
    return None if dense else ExpertSizes(count, getattr(config, about["experts_inner"]))


def _attention(config: Any, about: Mapping[str, Any]) -> Iterator[Weight]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    queries, keys = heads * config.head_dim, config.num_key_value_heads * config.head_dim
    biased = about.get("attention_bias")
    everywhere = biased == "configured" and config.attention_bias
    products = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    for name, outputs in ({"qkv_proj": queries + 2 * keys} if about.get("joined") else products).items():
        yield from _linear(f"self_attn.{name}", outputs, hidden, bias=everywhere or biased == "inputs")
    yield from _linear("self_attn.o_proj", hidden, queries, bias=everywhere)
    if about.get("head_norms") or about.get("wide_norms"):
        wide = about.get("wide_norms")
        yield Weight("self_attn.q_norm.weight", (queries if wide else config.head_dim,))
        yield Weight("self_attn.k_norm.weight", (keys if wide else config.head_dim,))
    if about.get("sinks"):
        yield Weight("self_attn.sinks", (heads,))


def _feed_forward(config: Any, about: Mapping[str, Any], layer: int) -> Iterator[Weight]:
    name, hidden, experts = about.get("feed_forward", "mlp"), config.hidden_size, expert_sizes(config, layer)
    if experts is not None:
        yield Weight(f"{name}.{about['router']}.weight", (experts.count, hidden))
        if about.get("router_bias"):
            yield Weight(f"{name}.{about['router']}.bias", (experts.count,))
        yield from _experts(f"{name}.experts", experts, hidden, about)
        return
    inner, bias = config.intermediate_size, about.get("mlp_bias") and config.mlp_bias
    gates = {"gate_up_proj": 2 * inner} if about.get("joined") else {"gate_proj": inner, "up_proj": inner}
    for gate, outputs in gates.items():
        yield from _linear(f"{name}.{gate}", outputs, hidden, bias=bias)
    yield from _linear(f"{name}.down_proj", hidden, inner, bias=bias)


def _experts(name: str, experts: ExpertSizes, hidden: int, about: Mapping[str, Any]) -> Iterator[Weight]:
    count, inner = experts.count, experts.inner
    if "expert_parts" not in about:
        yield Weight(f"{name}.gate_up_proj", (count, hidden, 2 * inner))
        yield Weight(f"{name}.gate_up_proj_bias", (count, 2 * inner))
        yield Weight(f"{name}.down_proj", (count, inner, hidden))
        yield Weight(f"{name}.down_proj_bias", (count, hidden))
        return
    shapes = ((inner, hidden), (inner, hidden), (hidden, inner))
    for index in range(count):
        for part, shape in zip(about["expert_parts"], shapes, strict=True):
            yield Weight(f"{name}.{index}.{part}.weight", shape)


def _linear(name: str, outputs: int, inputs: int, *, bias: Any) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (outputs, inputs), linear=True)
    if bias:
        yield Weight(f"{name}.bias", (outputs,))
