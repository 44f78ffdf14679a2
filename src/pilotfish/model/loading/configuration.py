"""A field that cannot be honoured is an error, so that no model is served wrong. Imports no torch."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pilotfish.errors import ModelError, ParameterError
from pilotfish.model.loading.metadata import eos_ids, one_line, quiet, read_object
from pilotfish.model.loading.multimodal import MULTIMODAL, text_config
from pilotfish.model.loading.schemes import quant_method, scheme_of

#: Differences between the served architectures; the file explains its fields.
ARCHITECTURES: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_name("architectures.toml").read_text("utf-8")
)
SUPPORTED = (*ARCHITECTURES, *MULTIMODAL)
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
#: Values of model_type that transformers has another name for.
_MODEL_TYPES = {"kimi_k2": "deepseek_v3"}


def load_config(directory: Path, max_model_len: int = 0) -> Any:
    """With `num_key_value_heads`, `head_dim`, `context` (`max_model_len` positions unless 0) and `quant_method`, or "".
    ModelError for a model that is not served, ParameterError for more positions than it has."""
    path = directory / "config.json"
    if not path.is_file():
        raise ModelError(f"model: {directory} has no config.json; a Hugging Face model directory is needed")
    fields = read_object(path)
    refuse_nonsense(fields, path)
    eos_ids(path, fields.get("eos_token_id"), vocab_size=None)  # one line, where transformers' error has three
    try:
        config = deepcopy(_parsed(directory, path.read_bytes()))
        if config.architectures[0] in MULTIMODAL:
            config = text_config(config, fields, directory)
    except ModelError:
        raise
    except Exception as error:  # errors in files and fields have no common base
        raise ModelError(f"model: {path} cannot be read: {one_line(error)}") from error
    refuse_unsupported(config, directory)
    scheme_of(directory)
    config.quant_method = quant_method(fields)
    if config.quant_method:
        del config.quantization_config  # or transformers would ask its own loaders
    _complete(config, directory, max_model_len)
    return config


@lru_cache(maxsize=16)
def _parsed(directory: Path, text: bytes) -> Any:  # what the directory's config.json holds
    """Cached: a start asks for it a dozen times, and transformers is slow."""
    fields = json.loads(text)
    with quiet():
        if known := _MODEL_TYPES.get(fields.get("model_type")):
            return CONFIG_MAPPING[known].from_dict({**fields, "model_type": known})
        return AutoConfig.from_pretrained(directory)


def _complete(config: Any, directory: Path, max_model_len: int) -> None:
    heads = config.num_attention_heads
    config.num_key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if heads % config.num_key_value_heads:
        divided = f"{heads} attention heads do not divide into {config.num_key_value_heads} KV heads"
        raise ModelError(f"model: {directory}: {divided}")
    if max_model_len > config.max_position_embeddings:
        allowed = f"at most {config.max_position_embeddings}, the model's context"
        raise ParameterError("max_model_len", max_model_len, allowed)
    config.context = max_model_len or config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        factors = "long_factor" if config.context > rope["original_max_position_embeddings"] else "short_factor"
        rope["long_factor"] = rope["short_factor"] = rope[factors]  # transformers would choose for every batch


def has_latents(config: Any) -> bool:
    """Whether one head's keys alone are kept, whose first `kv_lora_rank` elements are the values too."""
    return getattr(config, "kv_lora_rank", None) is not None


def kept_heads(config: Any) -> int:
    return 1 if has_latents(config) else int(config.num_key_value_heads)


def key_size(config: Any) -> int:
    """Elements of the keys of a head that is kept."""
    return int(config.kv_lora_rank + config.qk_rope_head_dim if has_latents(config) else config.head_dim)


def layer_windows(config: Any) -> tuple[int, ...]:
    """Positions that each layer sees, the row's own included; 0: all, also if no sequence can outgrow a window."""
    rule = ARCHITECTURES[config.architectures[0]]["windows"]
    window: int = getattr(config, "sliding_window", None) or 0
    if rule == "none" or window >= config.max_position_embeddings:
        window = 0
    if rule != "by layer":
        return tuple([window] * config.num_hidden_layers)
    return tuple(window if kind == "sliding_attention" else 0 for kind in config.layer_types)


def common_window(config: Any) -> int:
    """Positions beyond which no layer sees; 0: some layer sees all."""
    windows = layer_windows(config)
    return max(windows) if all(windows) else 0


def activation(config: Any) -> str:
    return getattr(config, "hidden_activation", None) or config.hidden_act  # type: ignore[no-any-return]


#: Fields that are positive integers if they are given.
_COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim",
    "qk_rope_head_dim", "v_head_dim", "n_routed_experts", "n_shared_experts", "n_group", "topk_group",
)  # fmt: skip


def refuse_nonsense(fields: Mapping[str, Any], path: Path) -> None:
    """ModelError for the first field that describes no model at all."""
    names = fields.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(
            f"model: {path}: architectures is {names!r}; a list of one of {', '.join(SUPPORTED)} is needed"
        )
    text = fields.get("text_config")
    given = chain(fields.items(), text.items() if isinstance(text, Mapping) else ())
    for name, value in ((name, value) for name, value in given if name in _COUNTS and value is not None):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"model: {path}: {name}: {value!r} is not allowed; expected an integer of at least 1")


def refuse_unsupported(config: Any, directory: Path) -> None:
    """ModelError, in one line, for the first field that cannot be served exactly."""
    architecture = config.architectures[0]
    if architecture not in ARCHITECTURES:
        raise ModelError(f"model: {directory} is a {architecture}; supported are {', '.join(SUPPORTED)}")
    for check in (_class, _layers, _attention, _rope, _feed_forward, _routing):
        for problem in check(config):
            raise ModelError(f"model: {directory} {problem}")


def _class(config: Any) -> Iterator[str]:
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type) != config.architectures[0]:
        yield f"has model_type {config.model_type}, which is no {config.architectures[0]}"


def _layers(config: Any) -> Iterator[str]:
    kinds = set(getattr(config, "layer_types", None) or ())
    unknown = sorted(kinds - {"full_attention", "sliding_attention"})
    if unknown:
        yield f"has layers of {', '.join(unknown)}; full_attention and sliding_attention are supported"
    used = getattr(config, "use_sliding_window", True)
    window = getattr(config, "sliding_window", None) if used else None
    further = getattr(config, "num_nextn_predict_layers", None) or 0
    if type(further) is not int or further < 0:
        yield f"has num_nextn_predict_layers {further!r}; an integer of at least 0 is needed"
    if "sliding_attention" in kinds and window is None:
        yield "has layers of sliding_attention and no sliding_window"
    if window is not None and window < 1:
        yield f"has a sliding_window of {window}; at least 1 is needed"


def _attention(config: Any) -> Iterator[str]:
    if getattr(config, "use_bidirectional_attention", None):
        yield "has use_bidirectional_attention; only causal attention is supported"
    if has_latents(config) and config.num_key_value_heads != config.num_attention_heads:
        yield f"has {config.num_key_value_heads} num_key_value_heads; its {config.num_attention_heads} heads are needed"
    if has_latents(config) and config.qk_rope_head_dim % 2:
        yield f"has a qk_rope_head_dim of {config.qk_rope_head_dim}; an even number is needed"
    if config.architectures[0] == "Gemma3ForCausalLM" and config.attn_logit_softcapping is not None:
        yield "has attn_logit_softcapping, which transformers ignores for Gemma 3; only null is supported"


def _rope(config: Any) -> Iterator[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    needed = ("llama_4_scaling_beta", "original_max_position_embeddings")
    if config.architectures[0] == "Ministral3ForCausalLM" and not all(parameters.get(name) for name in needed):
        yield f"lacks {' or '.join(needed)}, which a Ministral3ForCausalLM needs"
    for rope in (x for x in (parameters, *parameters.values()) if isinstance(x, dict)):
        partial = rope.get("partial_rotary_factor") or 1.0
        if rope.get("rope_type") == "longrope":
            head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            factors = [rope.get(name) or () for name in ("short_factor", "long_factor")]
            counts, original = list(map(len, factors)), rope.get("original_max_position_embeddings")
            if type(original) is not int or original < 1:
                yield f"has original_max_position_embeddings {original!r}; an integer of at least 1 is needed"
            if not all(isinstance(factor, int | float) and factor > 0 for factor in chain(*factors)):
                yield "has factors of longrope that are no positive numbers"
            if rope is not parameters:
                yield "has rotary embeddings of type longrope for some of its layers, which are not supported"
            if counts != [int(head * partial) // 2] * 2:
                yield f"has {counts[0]} short and {counts[1]} long factors; {int(head * partial) // 2} each are needed"
        if partial != 1.0 and not ARCHITECTURES[config.architectures[0]].get("partial"):
            yield f"has a partial_rotary_factor of {partial}; {config.architectures[0]} is supported with 1.0"


def _feed_forward(config: Any) -> Iterator[str]:
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts and not 1 <= (config.num_experts_per_tok or 0) <= experts:
        yield f"has num_experts_per_tok {config.num_experts_per_tok}; 1 to its {experts} experts are needed"
    if config.architectures[0] != "GptOssForCausalLM" and activation(config) not in ACTIVATIONS:  # gpt-oss has its own
        yield f"has activation {activation(config)}; supported are {', '.join(ACTIVATIONS)}"


def _routing(config: Any) -> Iterator[str]:
    """Of experts in groups, the best of which are chosen from."""
    for name, value in ARCHITECTURES[config.architectures[0]].get("fixed", {}).items():
        if (given := getattr(config, name, None)) not in (None, value):
            yield f"has {name} {given!r}; {value!r} is supported"
    method, methods = getattr(config, "topk_method", None), ("greedy", "group_limited_greedy")
    if config.architectures[0] == "DeepseekV2ForCausalLM" and method not in methods:
        yield f"has topk_method {method!r}; {' and '.join(methods)} are supported"
    if not hasattr(config, "n_group") or method == "greedy":
        return
    groups, kept, experts = config.n_group or 0, config.topk_group or 0, config.n_routed_experts
    if not groups or experts % groups or experts < 2 * groups:
        yield f"has n_group {config.n_group}; {experts} experts do not divide into so many"
    elif not config.num_experts_per_tok <= kept * experts // groups <= experts:
        yield f"has topk_group {config.topk_group}, of {groups} groups; {config.num_experts_per_tok} experts are chosen"
